"""The whole examination: what every rank looks at by itself, and what they find out together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.monitor.doctor.clocks import clock_finding, measure_skews
from ds_trainer.monitor.doctor.findings import Finding, Level, Place, Shared, merged
from ds_trainer.monitor.doctor.gradients import finding_of, run_self_test
from ds_trainer.monitor.doctor.jit_locks import extensions_directory, lock_findings
from ds_trainer.monitor.doctor.machine import (
    affinity,
    core_findings,
    disk_findings,
    limit_findings,
    memory_finding,
    shared_memory_findings,
    usual_places,
)
from ds_trainer.monitor.doctor.network import (
    bandwidth_finding,
    has_infiniband,
    interface_findings,
    name_findings,
)
from ds_trainer.monitor.doctor.operators import operator_findings
from ds_trainer.monitor.doctor.versions import (
    Difference,
    argument_differences,
    argument_facts,
    digest_of,
    machine_versions,
    version_findings,
    versions,
)
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.ranks import RankInfo


@dataclass(frozen=True)
class Request:
    """What is to be examined.

    Attributes:
        args: arguments of a run, or of no run in particular.
        compared: whether ``args`` are a run's own, and have to be alike on all ranks.
        gradients: the arguments whose gradients are tested.
    """

    args: TrainingArguments
    compared: bool
    gradients: Sequence[TrainingArguments]


def examine(request: Request, info: RankInfo) -> list[Shared]:
    """Look at everything. Collective; the same findings on all ranks."""
    here = Place(distributed.rank(), socket.gethostname())
    own = argument_facts(request.args) if request.compared else {}
    said = distributed.gather_objects((here, versions(), machine_versions(), digest_of(own), affinity()))
    places = [place for place, *_ in said]
    firsts = {place.host: place.rank for place in reversed(places)}
    found: list[tuple[Place, list[Finding]]] = []

    must = [(place, facts) for place, facts, *_ in said]
    should = [(place, facts) for place, _, facts, *_ in said]
    together = version_findings(must, versions()) + version_findings(should, ())
    if request.compared:
        digests = [digest for *_, digest, _ in said]
        together.append(_arguments(argument_differences(here, own, digests, distributed.gather_objects), digests[0]))
    found.append((places[0], together))

    fast = request.args.device_type == "cuda" or has_infiniband()
    mine = name_findings(info, len(firsts) > 1) + limit_findings(fast, info.rank, info.world_size)
    if firsts[here.host] == here.rank:
        mine = _machine(request, [cores for place, *_, cores in said if place.host == here.host]) + mine
    found += distributed.gather_objects((here, mine))

    skew = measure_skews(sorted(firsts.values()))
    skews = [(place, one) for place, one in distributed.gather_objects((here, skew)) if one is not None]
    found.append((places[0], [clock_finding(skews), bandwidth_finding(request.args.device)]))
    found.append((places[0], [_gradient(args) for args in request.gradients]))
    return merged(found)


def _arguments(found: Sequence[Difference], digest: str) -> Finding:
    if not found:
        return Finding(Level.OK, "arguments", f"alike ({digest})")
    remedy = "Give all ranks the same arguments."
    return Finding(Level.FAIL, "arguments", "; ".join(map(str, found)), remedy)


def _machine(request: Request, affinities: list[frozenset[int]]) -> list[Finding]:
    """What is the same for all ranks of a machine: one of them looks."""
    extensions = extensions_directory()
    return [
        *disk_findings(usual_places(request.args.output_dir, extensions), {}),
        *shared_memory_findings(),
        memory_finding(len(affinities)),
        *core_findings(affinities, os.environ.get("OMP_NUM_THREADS")),
        *lock_findings(extensions),
        *interface_findings(os.environ),
        *operator_findings(request.args.device_type),
    ]


def _gradient(args: TrainingArguments) -> Finding:
    layout = ParallelLayout.of(args, distributed.world_size())
    compiled = compile_config(args, layout, device=args.device_type, client_optimizer="the self-test")
    began = time.monotonic()
    report = run_self_test(args, compiled, layout)
    return finding_of(report, time.monotonic() - began)

"""All checks of ``ds-trainer doctor``: those of every rank, and those that compare ranks."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine.deepspeed_operators import missing_tools, operators, unreadable_architectures
from ds_trainer.monitor.doctor.findings import Finding, GroupedFinding, Level, RankHost, grouped
from ds_trainer.monitor.doctor.gradients import finding_of, run_self_test
from ds_trainer.monitor.doctor.jit_locks import extensions_directory, lock_findings
from ds_trainer.monitor.doctor.library_changes import library_findings
from ds_trainer.monitor.doctor.machine import (
    affinity,
    core_findings,
    disk_findings,
    limit_findings,
    memory_finding,
    shared_memory_findings,
    written_directories,
)
from ds_trainer.monitor.doctor.network import bandwidth_finding, has_infiniband, interface_findings, name_findings
from ds_trainer.monitor.doctor.versions import (
    Difference,
    argument_differences,
    argument_facts,
    digest_of,
    machine_versions,
    version_findings,
    versions,
)
from ds_trainer.parallel.kernel_trial import kernel_problem, suits
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit
from ds_trainer.utils.compiler_caches import compiler_caches, on_network
from ds_trainer.utils.ranks import RankInfo
from ds_trainer.utils.store import RankStore, expiry
from ds_trainer.utils.units import counted


@dataclass(frozen=True)
class Request:
    """What to examine.

    Attributes:
        args: the arguments of a run, or default ones.
        compared: whether ``args`` are those of a run, which must be equal on all ranks.
        gradients: the arguments whose gradients are tested.
    """

    args: TrainingArguments
    compared: bool
    gradients: Sequence[TrainingArguments]


def examine(request: Request, info: RankInfo) -> list[GroupedFinding]:
    """Run all checks. Collective; returns the same findings on all ranks."""
    here = RankHost(distributed.rank(), socket.gethostname())
    arguments = argument_facts(request.args) if request.compared else {}
    reports = distributed.gather_objects((here, versions(), machine_versions(), digest_of(arguments), affinity()))
    ranks = [rank for rank, *_ in reports]
    first_ranks = {rank.host: rank.rank for rank in reversed(ranks)}
    by_rank: list[tuple[RankHost, list[Finding]]] = []

    required = [(rank, facts) for rank, facts, *_ in reports]
    recommended = [(rank, facts) for rank, _, facts, *_ in reports]
    common = version_findings(required, versions()) + version_findings(recommended, ())
    # Ranks have the same versions, or fail above. Comparing reads files: once for all.
    common += distributed.broadcast_object(library_findings() if here == ranks[0] else [])
    if request.compared:
        digests = [digest for *_, digest, _ in reports]
        different = argument_differences(here, arguments, digests, distributed.gather_objects)
        common.append(_arguments(different, digests[0]))
    by_rank.append((ranks[0], common))

    fast = request.args.device_type == "cuda" or has_infiniband()
    local = name_findings(info, len(first_ranks) > 1) + limit_findings(fast, info.rank, info.world_size)
    if first_ranks[here.host] == here.rank:
        local = _machine(request, [cores for rank, *_, cores in reports if rank.host == here.host]) + local
    by_rank += distributed.gather_objects((here, local))

    skew = measure_skews(sorted(first_ranks.values()))
    skews = [(rank, one) for rank, one in distributed.gather_objects((here, skew)) if one is not None]
    by_rank.append((ranks[0], [clock_finding(skews), bandwidth_finding(request.args.device)]))
    by_rank.append((ranks[0], [_gradient(args) for args in request.gradients]))
    return grouped(by_rank)


def _arguments(differing: Sequence[Difference], digest: str) -> Finding:
    if not differing:
        return Finding(Level.OK, "arguments", f"equal on all ranks ({digest})")
    remedy = "Give all ranks the same arguments."
    return Finding(Level.FAIL, "arguments", "; ".join(map(str, differing)), remedy)


def _machine(request: Request, affinities: list[frozenset[int]]) -> list[Finding]:
    """Checks that one rank of a machine makes for all of its ranks."""
    extensions = extensions_directory()
    return [
        *disk_findings(written_directories(request.args.output_dir, extensions), {}),
        *shared_memory_findings(),
        memory_finding(len(affinities)),
        *core_findings(affinities, os.environ.get("OMP_NUM_THREADS")),
        *lock_findings(extensions),
        *interface_findings(os.environ),
        *operator_findings(request.args.device_type),
        *kernel_findings(request.args.device, os.environ),
    ]


def _gradient(args: TrainingArguments) -> Finding:
    layout = ParallelLayout.of(args, distributed.world_size())
    compiled = compile_config(args, layout, device=args.device_type, client_optimizer="the self-test")
    began = time.monotonic()
    report = run_self_test(args, compiled, layout)
    return finding_of(report, time.monotonic() - began)


_OPTIONAL = ("libaio.h",)


def operator_findings(device_type: str) -> list[Finding]:
    """Which operators are available, and which tools are missing to compile others at first use."""
    known = operators()
    ready = [one.name for one in known if one.installed]
    later = [one.name for one in known if one.compilable and not one.installed]
    never = [one.name for one in known if not one.compilable and not one.installed]
    parts = {"installed": ready, "compiled at first use": later, "not possible here": never}
    message = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)
    findings = [Finding(Level.OK, "operators of DeepSpeed", message)]
    for tool, remedy in missing_tools(device_type).items():
        level = Level.OK if tool in _OPTIONAL else Level.WARN
        findings.append(Finding(level, "compiling operators", f"{tool} is missing", remedy))
    unreadable = unreadable_architectures() if device_type == "cuda" else []
    if unreadable:
        message = f"TORCH_CUDA_ARCH_LIST has {' '.join(unreadable)}, which DeepSpeed cannot read: no operator compiles"
        findings.append(Finding(Level.WARN, "compiling operators", message, "Write numbers only (9.0), or unset it."))
    return findings


def kernel_findings(device: torch.device, environment: Mapping[str, str]) -> list[Finding]:
    """Whether Triton compiles here, and whether its cache and inductor's are on a disk of this machine."""
    findings = []
    for name, path in compiler_caches(environment).items():
        if on_network(path):
            message = f"{path} is on a network file system, where machines that compile at once fail"
            remedy = f"Set {name} to a directory on a disk of each machine."
            findings.append(Finding(Level.WARN, f"cache {name}", message, remedy))
        else:
            findings.append(Finding(Level.OK, f"cache {name}", f"{path}, on this machine"))
    if suits(device):
        problem = kernel_problem(device)
        if problem is None:
            findings.append(Finding(Level.OK, "Triton's kernels", "compiled, and equal to torch's operators"))
        else:
            remedy = "Without them the loss is slower. Triton needs a C compiler (gcc) and Python's headers."
            findings.append(Finding(Level.WARN, "Triton's kernels", problem, remedy))
    return findings


# Clock skew between the machines, measured by messages through the store of the process group.
#
# A rank reads its clock, asks the main process for its time, and reads its clock again when the answer arrives. The
# main process answered somewhere in between. So the skew is the difference to the midpoint, and its uncertainty is half
# the round trip. The fastest of a few round trips counts.


ROUND_TRIPS = 5
WARN_SECONDS, FAIL_SECONDS = 1.0, 60.0
_measured = itertools.count()


@dataclass(frozen=True)
class Skew:
    """A clock relative to the main process's: ``seconds`` ahead of it (negative: behind), plus or minus
    ``uncertainty``.
    """

    seconds: float
    uncertainty: float


def now() -> float:
    """This machine's clock, in seconds since 1970."""
    return time.time()


def measure_skews(asking: Sequence[int]) -> Skew | None:
    """The skew of this rank's clock. Collective: every rank passes the same ranks ``asking``.

    Returns:
        None on ranks that are not in ``asking``.
    """
    if distributed.world_size() == 1:
        return Skew(0.0, 0.0) if 0 in asking else None
    prefix, me = f"ds_trainer/clocks/{next(_measured)}", distributed.rank()
    if me == 0:
        for rank in asking:
            if rank != 0:
                _answer(RankStore(f"{prefix}/{rank}", ranks=2))
        return Skew(0.0, 0.0) if 0 in asking else None
    return _ask(RankStore(f"{prefix}/{me}", ranks=2)) if me in asking else None


def _answer(store: RankStore) -> None:
    expired = expiry(collective_limit().total_seconds())
    store.set("begin", 1)  # one rank after the other: nobody waits while the main process answers another
    for turn in range(ROUND_TRIPS):
        store.wait(f"{turn}/asked", expired)
        store.set(f"{turn}/answer", now())


def _ask(store: RankStore) -> Skew:
    expired = expiry(collective_limit().total_seconds())
    store.wait("begin", expired)
    best = Skew(0.0, float("inf"))
    for turn in range(ROUND_TRIPS):
        before, began = now(), time.monotonic()
        store.set(f"{turn}/asked", 1)
        answer = float(store.wait(f"{turn}/answer", expired))
        half = (time.monotonic() - began) / 2
        if half < best.uncertainty:
            best = Skew(before + half - answer, half)
    return best


def clock_finding(skews: Sequence[tuple[RankHost, Skew]]) -> Finding:
    """One finding for all machines."""
    if len(skews) < 2:
        return Finding(Level.OK, "clocks", "one machine")
    rank, worst = max(skews, key=lambda one: abs(one[1].seconds) - one[1].uncertainty)
    difference = abs(worst.seconds) - worst.uncertainty
    direction, first = "ahead of" if worst.seconds > 0 else "behind", skews[0][0]
    message = f"{rank.host} (rank {rank.rank}) is {abs(worst.seconds):.3g} s {direction} {first.host}"
    message += f" (rank {first.rank}), +/- {worst.uncertainty:.2g} s"
    if difference <= WARN_SECONDS:
        return Finding(Level.OK, "clocks", f"{counted(len(skews), 'machine')}; largest skew: {message}")
    remedy = "Run a time service (chronyd) on all machines: time limits, locks and logs are compared across them."
    return Finding(Level.FAIL if difference > FAIL_SECONDS else Level.WARN, "clocks", message, remedy)

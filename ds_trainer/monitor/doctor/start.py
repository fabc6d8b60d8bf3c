"""What is looked at when a training starts: a few milliseconds, and two numbers from every rank.

Ranks that have other versions, other code or other arguments are refused. What may hurt the run later is said in the
log: little room on a disk or in shared memory, a lock that compilers would wait for.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.monitor.doctor.findings import Finding, Level, Place
from ds_trainer.monitor.doctor.jit_locks import extensions_directory, remove_certain
from ds_trainer.monitor.doctor.machine import disk_findings, existing, shared_memory_findings
from ds_trainer.monitor.doctor.versions import (
    argument_differences,
    argument_facts,
    differences,
    digest_of,
    script_digest,
    versions,
)
from ds_trainer.monitor.units import human_duration
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def check_ranks(args: TrainingArguments, compiled: Mapping[str, Any]) -> None:
    """Compare all ranks. Collective.

    Raises:
        ConfigError: versions, code or arguments differ; names the ranks, their hosts and the values.
    """
    place = Place(distributed.rank(), socket.gethostname())
    own = argument_facts(args, compiled)
    facts = {**versions(), **script_digest()}
    if distributed.alike(repr((digest_of(own), sorted(facts.items())))):
        return
    said = distributed.gather_objects((place, digest_of(own), facts))
    problems = [
        f"{difference}. Start all ranks from the same installation."
        for difference in differences([(where, found) for where, _, found in said])
    ]
    digests = [digest for _, digest, _ in said]
    problems += [
        f"{difference}. Give all ranks the same arguments."
        for difference in argument_differences(place, own, digests, distributed.gather_objects)
    ]
    if problems:
        raise ConfigError(problems)


def check_machine(args: TrainingArguments, checkpoint_bytes: int) -> list[Finding]:
    """Look at this machine and say in the log what may hurt; one rank of each machine calls it. Stale locks go.

    Args:
        args: of the training.
        checkpoint_bytes: of the next checkpoint, as far as that can be estimated.
    """
    extensions = extensions_directory()
    places: dict[str, Any] = {} if args.output_dir is None else {"output_dir": args.output_dir}
    findings = [*disk_findings(places, {"output_dir": max(checkpoint_bytes, 2**28)}), *shared_memory_findings()]
    if existing(extensions) == extensions:
        removed, left = remove_certain(extensions)
        for lock in removed:
            logger.warning("Removed %s: its process is gone, and compiling would have waited for it.", lock.path)
        for lock in left:
            said = f"no process here holds it, last sign of work {human_duration(max(0.0, lock.seconds))} ago"
            remedy = f"A start that hangs waits for it: rm {lock.path}"
            findings.append(Finding(Level.WARN, f"lock {lock.path}", said, remedy))
    bad = [finding for finding in findings if finding.level != Level.OK]
    for finding in bad:
        logger.warning("%s: %s: %s. %s", socket.gethostname(), finding.name, finding.said, finding.remedy)
    return bad

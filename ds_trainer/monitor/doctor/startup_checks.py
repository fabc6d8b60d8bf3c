"""Checks at the start of every training: a few milliseconds, and two numbers from every rank.

Different versions, code or arguments on some ranks are an error. What may harm the run later is a warning in the log:
little free space on a disk or in shared memory, a lock that a compilation would wait for.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.monitor.doctor.findings import Finding, Level, RankHost
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
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.units import human_duration

logger = get_logger(__name__)


def check_ranks(args: TrainingArguments, compiled: Mapping[str, Any]) -> None:
    """Compare all ranks. Collective.

    Raises:
        ConfigError: versions, code or arguments differ; names the ranks, their hosts and the values.
    """
    here = RankHost(distributed.rank(), socket.gethostname())
    arguments = argument_facts(args, compiled)
    facts = {**versions(), **script_digest()}
    if distributed.alike(repr((digest_of(arguments), sorted(facts.items())))):
        return
    reports = distributed.gather_objects((here, digest_of(arguments), facts))
    problems = [
        f"{difference}. Start all ranks from the same installation."
        for difference in differences([(rank, values) for rank, _, values in reports])
    ]
    digests = [digest for _, digest, _ in reports]
    problems += [
        f"{difference}. Give all ranks the same arguments."
        for difference in argument_differences(here, arguments, digests, distributed.gather_objects)
    ]
    if problems:
        raise ConfigError(problems)


def check_machine(args: TrainingArguments, checkpoint_bytes: int) -> list[Finding]:
    """Check this machine, log warnings and remove stale locks. Called by one rank of each machine.

    Args:
        args: the arguments of the training.
        checkpoint_bytes: estimated size of the next checkpoint.

    Returns:
        The findings that are not OK.
    """
    extensions = extensions_directory()
    # Of a disk that all machines share, one speaks.
    directories: dict[str, Any] = {"output_dir": args.output_dir} if args.output_dir and args.should_save else {}
    findings = [*disk_findings(directories, {"output_dir": max(checkpoint_bytes, 2**28)}), *shared_memory_findings()]
    if existing(extensions) == extensions:
        removed, left = remove_certain(extensions)
        for lock in removed:
            text = "Removed %s: its process has ended, and a compilation would have waited for it."
            logger.warning(text, lock.path, extra=EVERY_RANK)
        for lock in left:
            quiet = human_duration(max(0.0, lock.seconds))
            message = f"no process of this machine holds it; last change {quiet} ago"
            remedy = f"If the start hangs, it waits for this lock: rm {lock.path}"
            findings.append(Finding(Level.WARN, f"lock {lock.path}", message, remedy))
    bad = [finding for finding in findings if finding.level != Level.OK]
    for finding in bad:
        where = socket.gethostname(), finding.name
        logger.warning("%s: %s: %s. %s", *where, finding.message, finding.remedy, extra=EVERY_RANK)
    return bad

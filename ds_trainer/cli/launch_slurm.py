"""``--slurm`` of ``ds-trainer launch`` and ``ds-trainer run``: its options; prints a batch script."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.launching.batch_script import BatchRequest, batch_script
from ds_trainer.launching.launch_request import LaunchRequest
from ds_trainer.utils.errors import ConfigError

_DEFAULTS = BatchRequest()
# Options of a batch script by the field of BatchRequest that they set.
_OPTIONS = {
    "time": "--time",
    "signal_seconds": "--signal-before",
    "partition": "--partition",
    "account": "--account",
    "job_name": "--job-name",
    "cpus_per_rank": "--cpus-per-rank",
    "requeue": "--no-requeue",
    "sbatch_args": "--sbatch-arg",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; each is None if not given."""
    add = parser.add_argument_group("batch scripts").add_argument
    add("--slurm", action="store_true", help="print a batch script for sbatch without running anything")
    add("--time", metavar="LIMIT", help=f"time limit of the job (default: {_DEFAULTS.time})")
    add("--partition", metavar="NAME", help="partition")
    add("--account", metavar="NAME", help="account")
    add("--job-name", metavar="NAME", help="name of the job (default: ds-trainer)")
    cores = _DEFAULTS.cpus_per_rank
    add("--cpus-per-rank", type=int, metavar="N", help=f"CPU cores per rank (default: {cores})")
    early = _DEFAULTS.signal_seconds
    help_text = f"how long before the time limit to stop at a checkpoint (default: {early})"
    add("--signal-before", dest="signal_seconds", type=int, metavar="SECONDS", help=help_text)
    add("--no-requeue", dest="requeue", action="store_false", default=None, help="never requeue the job")
    add(
        "--sbatch-arg",
        dest="sbatch_args",
        action="append",
        metavar="ARG",
        help="as --sbatch-arg=--qos=long; repeatable",
    )


def print_batch_script(options: argparse.Namespace, request: LaunchRequest) -> None:
    """Print the batch script for ``request``.

    Raises:
        ConfigError: the job cannot work.
    """
    given = _given(options)
    if "sbatch_args" in given:
        given["sbatch_args"] = tuple(given["sbatch_args"])
    if request.max_restarts:
        given["max_restarts"] = request.max_restarts
    print(batch_script(request, replace(_DEFAULTS, folder=str(Path.cwd()), **given)), end="")


def refuse_without_slurm(options: argparse.Namespace) -> None:
    """Raise ConfigError if options of a batch script are given without --slurm."""
    if given := [_OPTIONS[name] for name in _given(options)]:
        raise ConfigError(f"{', '.join(given)}: only with --slurm, which prints a batch script.")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}

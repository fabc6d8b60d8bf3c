"""``ds-trainer launch --slurm``: its options, and the batch script on standard output."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.launching.batch_script import BatchRequest, batch_script
from ds_trainer.launching.request import LaunchRequest
from ds_trainer.utils.errors import ConfigError

_DEFAULTS = BatchRequest()
# Options of a batch script, by the field of BatchRequest that they set.
_OPTIONS = {
    "time": "--time",
    "signal_seconds": "--signal-before",
    "partition": "--partition",
    "account": "--account",
    "job_name": "--job-name",
    "cpus_per_rank": "--cpus-per-rank",
    "requeue": "--no-requeue",
    "sbatch_words": "--sbatch",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them; each is None where it is not given."""
    add = parser.add_argument_group("batch scripts").add_argument
    add("--slurm", action="store_true", help="print a batch script for sbatch, and start nothing")
    add("--time", metavar="LIMIT", help=f"time limit of one start (default: {_DEFAULTS.time})")
    add("--partition", metavar="NAME", help="partition of the job")
    add("--account", metavar="NAME", help="account of the job")
    add("--job-name", metavar="NAME", help="default: ds-trainer")
    cores = _DEFAULTS.cpus_per_rank
    add("--cpus-per-rank", type=int, metavar="N", help=f"cores for each rank (default: {cores})")
    early = _DEFAULTS.signal_seconds
    help_text = f"stop at a checkpoint so long before the time limit (default: {early})"
    add("--signal-before", dest="signal_seconds", type=int, metavar="SECONDS", help=help_text)
    add("--no-requeue", dest="requeue", action="store_false", default=None, help="the job starts once only")
    add("--sbatch", dest="sbatch_words", action="append", metavar="WORD", help="further word, as --sbatch=--qos=long")


def print_batch_script(options: argparse.Namespace, request: LaunchRequest) -> None:
    """Print the script that the options describe.

    Raises:
        ConfigError: the job cannot work.
    """
    given = _given(options)
    if "sbatch_words" in given:
        given["sbatch_words"] = tuple(given["sbatch_words"])
    if request.max_restarts:
        given["max_restarts"] = request.max_restarts
    print(batch_script(request, replace(_DEFAULTS, folder=str(Path.cwd()), **given)), end="")


def refuse_without_slurm(options: argparse.Namespace) -> None:
    """Raise ConfigError where options of a batch script are given and no batch script is asked for."""
    if given := [_OPTIONS[name] for name in _given(options)]:
        raise ConfigError(f"launch: {', '.join(given)} can only be given with --slurm, which prints a batch script.")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}

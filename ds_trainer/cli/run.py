"""``ds-trainer run``: runs a script that was written for transformers.Trainer, unchanged, on this package's Trainer."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_trainer.arguments import overrides
from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.cli import launch_slurm
from ds_trainer.cli.launch import add_options, launch_request
from ds_trainer.compatibility.replacement import replace_transformers
from ds_trainer.launching.launch_request import is_recipe, read_target
from ds_trainer.launching.runner import print_command
from ds_trainer.launching.runner import run as launch
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE, FAILED
from ds_trainer.utils.ranks import likely_rank

HELP = "run a script written for transformers.Trainer, unchanged"
DESCRIPTION = """Run a Python script in which Trainer, TrainingArguments and their like, imported from transformers, are
those of ds_trainer. Without further options the script runs in this process; launch options start one process per rank.
Place options before the script."""
TAKES_RAW_ARGV = True  # arguments after the script belong to it


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override an argument of every TrainingArguments that the script makes, such as zero_stage=3; repeatable",
    )
    add_options(parser.add_argument_group("launch options"))
    launch_slurm.add_options(parser)
    parser.add_argument("target", metavar="SCRIPT", help="a Python script (.py)")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.usage = "ds-trainer run [--set NAME=VALUE ...] [launch options] SCRIPT ..."


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the script, here or on all ranks; returns its exit code."""
    if rest:
        raise ConfigError(f"run: unknown option {rest[0]!r}. Place arguments of the script after it.")
    if is_recipe(options.target):
        raise ConfigError(f"run: {options.target!r} is a recipe, not a script: ds-trainer train {options.target}.")
    values = overrides.read_overrides(options.set, Seq2SeqTrainingArguments)
    if not options.slurm:
        launch_slurm.refuse_without_slurm(options)
    if not options.slurm and not _has_launch_options(options):
        return _run_here(read_target(options.target, options.args).path, options.args, values)
    request = launch_request(options, options.args)
    settings = [part for text in options.set for part in ("--set", text)]
    target = replace(request.target, runner=("-m", "ds_trainer.run", *settings))
    request = replace(request, target=target)
    if options.slurm:
        launch_slurm.print_batch_script(options, request)
        return DONE
    if options.dry_run:
        print_command(request)
        return DONE
    return launch(request)


def _has_launch_options(options: argparse.Namespace) -> bool:
    parser = argparse.ArgumentParser()
    add_options(parser)
    defaults = vars(parser.parse_args([]))
    return any(getattr(options, name) != default for name, default in defaults.items())


def _run_here(path: str, args: Sequence[str], values: dict[str, object]) -> int:
    """Run the script as ``python SCRIPT ARGS`` does, with the replaced names and the values of ``--set``."""
    replace_transformers()
    overrides.activate(values)
    sys.argv = [path, *args]
    if not getattr(sys.flags, "safe_path", False):  # with -P the first entry is not Python's own
        sys.path[0] = str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except BrokenPipeError:  # of the script: it must not pass for a closed pipe behind ds-trainer, which is no failure
        traceback.print_exc()
        return FAILED
    except SystemExit as end:
        if not end.code:  # otherwise the last line is the error of the script
            _report_unused()
        raise
    _report_unused()
    return DONE


def _report_unused() -> None:
    unused = overrides.unused()
    if unused and likely_rank(os.environ) == 0:
        print(
            f"ds-trainer: --set {', '.join(unused)} had no effect: the script made no arguments object that has it.",
            file=sys.stderr,
            flush=True,
        )

"""``ds-trainer checkpoint``: inspect, verify, export, convert and merge checkpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ds_trainer.cli import checkpoint_convert, checkpoint_merge
from ds_trainer.cli.argv import add_dtype, unknown_choice
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.sizes import parse_size

HELP = "inspect, verify, export, convert or merge checkpoints"
DESCRIPTION = """Inspect checkpoints, verify the checksums of their files, export the model, convert
other formats, or merge adapters.
Needs neither a GPU nor the parallel layout that wrote the checkpoint."""

_PATH = "a checkpoint-N directory, or the output directory that contains them"


class Action(NamedTuple):
    """A subcommand of ``ds-trainer checkpoint``: its help text, its arguments, and its function."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the actions and their arguments.

    Raises:
        ConfigError: the first of ``args`` is not an action.
    """
    first = next((arg for arg in args if not arg.startswith("-")), None)
    if first is not None and first not in ACTIONS:
        raise unknown_choice("action", first, ACTIONS, "checkpoint")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in ACTIONS.items():
        subparser = actions.add_parser(name, help=action.help, description=action.help, allow_abbrev=False)
        action.configure(subparser)


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Run the action; returns the exit code."""
    if args:
        raise ConfigError(f"ds-trainer checkpoint {options.action}: unrecognized arguments: {' '.join(args)}.")
    ACTIONS[options.action].run(options)
    return 0


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=lambda text: Path(os.path.expanduser(text)), help=_PATH)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _path(parser)
    parser.add_argument("--to", metavar="DIR", required=True, help="directory for the model; must not exist")
    add_dtype(parser, "that in which the model was computed")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a weights file; default: 5GB"
    )
    parser.add_argument("--merge-lora", action="store_true", help="merge the adapters into the weights")
    parser.add_argument(
        "--model", metavar="DIR", help="directory with the model's config.json, for a converted checkpoint"
    )


def _inspect(options: argparse.Namespace) -> None:
    from ds_trainer.checkpoint.export.inspection import describe_checkpoint, newest_checkpoint

    print(describe_checkpoint(newest_checkpoint(options.path)))


def _verify(options: argparse.Namespace) -> None:
    from ds_trainer.checkpoint.export.inspection import checkpoint_problems, find_checkpoints

    damaged = []
    for checkpoint in find_checkpoints(options.path):
        problems = checkpoint_problems(checkpoint)
        damaged += [f"{checkpoint}: {problem}" for problem in problems]
        print(f"{checkpoint}: {'damaged' if problems else 'intact'}", flush=True)
    if damaged:
        raise ConfigError(damaged)


def _export(options: argparse.Namespace) -> None:
    import torch

    from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
    from ds_trainer.checkpoint.export.inspection import checkpoint_problems, human_bytes, newest_checkpoint

    try:
        shard = parse_size(options.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}.") from None
    checkpoint = newest_checkpoint(options.path)
    if problems := checkpoint_problems(checkpoint):
        raise ConfigError([f"{checkpoint}: {problem}" for problem in problems])
    exported = export_checkpoint(
        checkpoint,
        Path(os.path.expanduser(options.to)),
        shard,
        None if options.dtype is None else getattr(torch, options.dtype),
        options.merge_lora,
        None if options.model is None else Path(os.path.expanduser(options.model)),
    )
    total = human_bytes(sum(exported.files.values()))
    print(f"{checkpoint} -> {exported.directory}: {len(exported.files)} files, {total}")


ACTIONS = {
    "inspect": Action("describe a checkpoint (the newest one in a directory)", _path, _inspect),
    "verify": Action("verify the checksums of a checkpoint (of all in a directory)", _path, _verify),
    "export": Action("export the model to a directory that from_pretrained can load", _export_arguments, _export),
    "convert": Action(checkpoint_convert.HELP, checkpoint_convert.configure, checkpoint_convert.run),
    "merge": Action(checkpoint_merge.HELP, checkpoint_merge.configure, checkpoint_merge.run),
}

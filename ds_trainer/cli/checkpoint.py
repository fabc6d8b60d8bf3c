"""``ds-trainer checkpoint``: inspect, verify, export, convert and merge checkpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.cli.argv import Action, add_actions, add_dtype
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import new_output
from ds_trainer.utils.units import counted, human_bytes, parse_size

if TYPE_CHECKING:
    from ds_trainer.checkpoint.export.checkpoint_export import ExportResult

HELP = "inspect, verify, export, convert or merge checkpoints"
DESCRIPTION = """Inspect checkpoints, verify the checksums of their files, export the model, convert
other formats, or merge adapters.
Needs neither a GPU nor the parallel layout that wrote the checkpoint."""

_NATIVE, _UNIVERSAL = "ds_trainer", "universal"
_PATH = "a checkpoint-N directory, or the output directory that contains them"


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the actions and their arguments.

    Raises:
        ConfigError: the first of ``args`` is not an action.
    """
    for subparser, action in add_actions(parser, args, "checkpoint", ACTIONS):
        action.configure(subparser)


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Run the action; returns the exit code."""
    if args:
        raise ConfigError(f"ds-trainer checkpoint {options.action}: unrecognized arguments: {' '.join(args)}.")
    ACTIONS[options.action].run(options)
    return 0


def _expanded(text: str) -> Path:
    return Path(os.path.expanduser(text))


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=_expanded, help=_PATH)


def _add_output(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument(
        "--to", metavar="DIR", type=_expanded, required=True, help="directory for the model; must not exist"
    )
    add_dtype(parser, dtype)
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a weights file; default: 5GB"
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _path(parser)
    _add_output(parser, "that in which the model was computed")
    parser.add_argument("--merge-lora", action="store_true", help="merge the adapters into the weights")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=_expanded,
        help="directory with the model's config.json, for a converted checkpoint",
    )


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="SRC", type=_expanded, help="the checkpoint to convert")
    parser.add_argument(
        "--to",
        metavar="DIR",
        type=_expanded,
        required=True,
        help="directory in which checkpoint-N or global_stepN is created",
    )
    parser.add_argument(
        "--format", choices=(_NATIVE, _UNIVERSAL), default=_NATIVE, help=f"output format; default: {_NATIVE}"
    )
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load files that contain objects other than tensors and DeepSpeed's classes; they may run any code",
    )


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="directory or Hub name of adapters, or the output directory of a run"
    )
    parser.add_argument(
        "--base", metavar="DIR", help="directory of the base model, if it is not where the adapters say"
    )
    _add_output(parser, "that of the base")


def _shard_bytes(options: argparse.Namespace) -> int:
    try:
        return parse_size(options.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}.") from None


def _dtype(options: argparse.Namespace) -> Any:
    import torch

    return None if options.dtype is None else getattr(torch, options.dtype)


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
    from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
    from ds_trainer.checkpoint.export.inspection import checkpoint_problems, newest_checkpoint

    shard = _shard_bytes(options)
    checkpoint = newest_checkpoint(options.path)
    if problems := checkpoint_problems(checkpoint):
        raise ConfigError([f"{checkpoint}: {problem}" for problem in problems])
    exported = export_checkpoint(checkpoint, options.to, shard, _dtype(options), options.merge_lora, options.model)
    _print_files(str(checkpoint), exported)


def _convert(options: argparse.Namespace) -> None:
    from ds_trainer.checkpoint.converters.checkpoint_import import export_universal, import_checkpoint

    if not options.to.is_dir():
        new_output(options.to, "--to", "directory")
    if options.format == _UNIVERSAL:
        print(f"{options.path} -> {export_universal(options.path, options.to)}")
        return
    final, converted = import_checkpoint(options.path, options.to, options.trust_checkpoint)
    print("\n  ".join([f"{options.path} -> {final}", *converted.notes]))


def _merge(options: argparse.Namespace) -> None:
    from ds_trainer.recipes.adapter_merging import merge_adapters
    from ds_trainer.recipes.saved_model import find_saved_model

    shard = _shard_bytes(options)
    saved = find_saved_model(options.path, options.base)
    _print_files(f"{saved.directory} + {saved.base}", merge_adapters(saved, options.to, shard, _dtype(options)))


def _print_files(source: str, written: ExportResult) -> None:
    total = human_bytes(sum(written.files.values()))
    print(f"{source} -> {written.directory}: {counted(len(written.files), 'file')}, {total}")


ACTIONS = {
    "inspect": Action("describe a checkpoint (the newest one in a directory)", _path, _inspect),
    "verify": Action("verify the checksums of a checkpoint (of all in a directory)", _path, _verify),
    "export": Action("export the model to a directory that from_pretrained can load", _export_arguments, _export),
    "convert": Action(
        "convert checkpoints of DeepSpeed and transformers to ds_trainer's format, or to DeepSpeed's universal format",
        _convert_arguments,
        _convert,
    ),
    "merge": Action(
        "merge saved adapters into their base model: a directory that loads without PEFT", _merge_arguments, _merge
    ),
}

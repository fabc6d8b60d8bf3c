"""``ds-trainer checkpoint``: look at a checkpoint, check it, take the model out of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ds_trainer.cli import checkpoint_convert
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.sizes import parse_size

HELP = "inspect, verify or export a checkpoint on disk"
DESCRIPTION = """Look at checkpoints, read and compare all of their files, or take the model out. Neither a GPU nor the
layout that wrote a checkpoint is needed."""

TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PATH = "a checkpoint-N directory, or the one that they are in"


class Action(NamedTuple):
    """A word after ``ds-trainer checkpoint``: what it says of itself, its own words, and what it does."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the actions and their words."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in ACTIONS.items():
        subparser = actions.add_parser(name, help=action.help, description=action.help, allow_abbrev=False)
        action.configure(subparser)


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Do it; gives the exit code."""
    if words:
        raise ConfigError(f"ds-trainer checkpoint {options.action}: {' '.join(words)} is not understood.")
    ACTIONS[options.action].run(options)
    return 0


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=lambda text: Path(text).expanduser(), help=_PATH)


def _export_words(parser: argparse.ArgumentParser) -> None:
    _path(parser)
    parser.add_argument("--to", metavar="DIR", required=True, help="a new directory for the model")
    types = ", ".join(TYPES.values())
    parser.add_argument("--dtype", metavar="TYPE", help=f"{types}; default: what the model computed with")
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a file of weights; default: 5GB")
    parser.add_argument("--merge-lora", action="store_true", help="whole weights with the adapters merged into them")
    parser.add_argument("--model", metavar="DIR", help="of a converted checkpoint: where the model's config.json is")


def _inspect(options: argparse.Namespace) -> None:
    from ds_trainer.checkpoint.export.inspection import describe_checkpoint, newest_at

    print(describe_checkpoint(newest_at(options.path)))


def _verify(options: argparse.Namespace) -> None:
    from ds_trainer.checkpoint.export.inspection import checkpoints_at, problems_of

    wrong = []
    for checkpoint in checkpoints_at(options.path):
        problems = problems_of(checkpoint)
        wrong += [f"{checkpoint}: {problem}" for problem in problems]
        print(f"{checkpoint}: {'damaged' if problems else 'intact'}", flush=True)
    if wrong:
        raise ConfigError(wrong)


def _export(options: argparse.Namespace) -> None:
    import torch

    from ds_trainer.checkpoint.export.export import export_checkpoint
    from ds_trainer.checkpoint.export.inspection import human_bytes, newest_at, problems_of

    dtype = None if options.dtype is None else TYPES.get(options.dtype, options.dtype)
    if dtype is not None and dtype not in TYPES.values():
        raise ConfigError(f"--dtype {options.dtype}: choose one of {', '.join(TYPES.values())}.")
    try:
        shard = parse_size(options.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}.") from None
    checkpoint = newest_at(options.path)
    if problems := problems_of(checkpoint):
        raise ConfigError([f"{checkpoint}: {problem}" for problem in problems])
    exported = export_checkpoint(
        checkpoint,
        Path(options.to).expanduser(),
        shard,
        None if dtype is None else getattr(torch, dtype),
        options.merge_lora,
        None if options.model is None else Path(options.model).expanduser(),
    )
    total = human_bytes(sum(exported.files.values()))
    print(f"{checkpoint} -> {exported.directory}: {len(exported.files)} files, {total}")


ACTIONS = {
    "inspect": Action("print what a checkpoint is (the newest one in a directory)", _path, _inspect),
    "verify": Action("read all files of a checkpoint (of all in a directory) and compare them", _path, _verify),
    "export": Action("write the model as a directory for from_pretrained", _export_words, _export),
    "convert": Action(checkpoint_convert.HELP, checkpoint_convert.configure, checkpoint_convert.run),
}

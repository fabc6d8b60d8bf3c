"""``ds-trainer arguments``: the help of every training argument, by topic."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError, did_you_mean

HELP = "list all training arguments by topic, or search them"
DESCRIPTION = """List the fields of TrainingArguments with their defaults, grouped by topic. With TEXT, list only
the topics that contain it."""


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("text", nargs="?", metavar="TEXT", help="text to search for, such as precision or zero_stage")


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Print the help text; returns the exit code."""
    if args:
        raise ConfigError(f"ds-trainer arguments: unrecognized arguments: {' '.join(args)}.")
    text = HfArgumentParser(TrainingArguments, prog="train.py").format_help()
    _, *topics = text.split("\n\n")[1:]  # without the usage and -h
    wanted = (options.text or "").lower()
    matching = [topic for topic in topics if wanted in topic.lower()]
    if not matching:
        names = [field.name for field in dataclasses.fields(TrainingArguments)]
        raise ConfigError(f"no argument or topic contains {options.text!r}.{did_you_mean(options.text, names)}")
    print("\n\n".join(topic.rstrip("\n") for topic in matching))
    return 0

"""``ds-trainer arguments``: what every argument means, by topic."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError, did_you_mean

HELP = "list all arguments by topic, or the topics that have a word in them"
DESCRIPTION = """List the fields of TrainingArguments with their defaults, grouped by topic. With a word: only
the topics whose title or arguments contain it."""


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the subcommand's own words."""
    parser.add_argument("word", nargs="?", metavar="WORD", help="for instance precision, or zero_stage")


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the help text; gives the exit code."""
    if words:
        raise ConfigError(f"ds-trainer arguments: {' '.join(words)} is not understood.")
    text = HfArgumentParser(TrainingArguments, prog="train.py").format_help()
    _, *topics = text.split("\n\n")[1:]  # the usage, and -h
    word = (options.word or "").lower()
    found = [topic for topic in topics if word in topic.lower()]
    if not found:
        names = [field.name for field in dataclasses.fields(TrainingArguments)]
        raise ConfigError(f"no argument or topic has {options.word!r} in it.{did_you_mean(options.word, names)}")
    print("\n\n".join(topic.rstrip("\n") for topic in found))
    return 0

"""``ds-trainer reference``: every member and every argument of the reference API; the tables of docs/reference.md."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ds_trainer.arguments.better import BETTER
from ds_trainer.arguments.support import ENGINE
from ds_trainer.arguments.training_arguments import Seq2SeqTrainingArguments
from ds_trainer.cli.support import table
from ds_trainer.utils.errors import ConfigError

HELP = "print how every member and argument of the reference API is supported"
DESCRIPTION = """Print, as Markdown, every member and every argument of the reference API (transformers 5) with
its state: supported, better (how), refused (what to use instead), or not yet."""


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """There is nothing to declare."""


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the page; gives the exit code."""
    if words:
        raise ConfigError(f"ds-trainer reference: {' '.join(words)} is not understood.")
    print(reference_page())
    return 0


def reference_page() -> str:
    """The page as Markdown."""
    members, arguments = member_rows(), argument_rows()
    states = [row[1] for row in (*members, *arguments)]
    total = ", ".join(f"{states.count(state)} {state}" for state in ("supported", "better", "refused", "not yet"))
    return "\n\n".join(
        [
            "# The reference API, member by member",
            "Made by `ds-trainer reference` from the code; a test holds this page to it. The reference is transformers "
            "5, and what version 3 had for TensorFlow: *supported* means as there, *better* says how, *refused* names "
            "what to use instead: "
            f"{total}.",
            "## Members",
            table(("member", "state", "what it does"), members),
            "## Arguments",
            table(("argument", "state", "what it does"), arguments),
        ]
    )


def member_rows() -> list[tuple[str, str, str]]:
    """Name, state and meaning of every class and member."""
    import ds_trainer
    from ds_trainer.training.members import REFERENCE

    rows = []
    for class_name, notes in REFERENCE.items():
        found = getattr(ds_trainer, class_name, None)
        rows.append(_member_row(class_name, found, ""))
        rows += [_member_row(f"{class_name}.{name}", getattr(found, name, None), note) for name, note in notes.items()]
    return rows


def _member_row(name: str, member: Any, note: str) -> tuple[str, str, str]:
    from ds_trainer.training.members import REFUSED

    if name in REFUSED:
        return f"`{name}`", "refused", REFUSED[name]
    if member is None:
        return f"`{name}`", "not yet", "Not there yet."
    return f"`{name}`", "better" if note else "supported", f"{_first_sentence(member)} {note}".rstrip()


def _first_sentence(member: Any) -> str:
    """The first paragraph of the docstring, up to its first full stop; markup of reStructuredText as Markdown."""
    text = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
    text = re.split(r"(?<=[^.]\.) ", text, maxsplit=1)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def argument_rows() -> list[tuple[str, str, str]]:
    """Name, state and meaning of every argument."""
    engine = {limit.field: limit for limit in ENGINE}
    topics = Seq2SeqTrainingArguments.topics()
    rows = []
    for field in fields(Seq2SeqTrainingArguments):
        name = field.name
        if name in engine:
            partly = callable(engine[name].works) and name not in ("fsdp", "fsdp_config")
            state = "better" if name in BETTER else "supported" if partly else "refused"
            note = BETTER.get(name) or engine[name].instead
        elif topics[name].startswith("For scripts"):
            state, note = "supported", "The Trainer does not use it."
        else:
            state, note = ("better", BETTER[name]) if BETTER.get(name) else ("supported", "")
        rows.append((f"`{name}`", state, f"{field.metadata['help']} {note}".rstrip()))
    return rows

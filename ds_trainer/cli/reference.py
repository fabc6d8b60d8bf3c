"""``ds-trainer reference``: every member and every argument of the reference API; the tables of docs/reference.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from ds_trainer.arguments.better import BETTER
from ds_trainer.arguments.support import ENGINE, LATER
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
            "5: *supported* means as there, *better* says how, *refused* names what to use instead: "
            f"{total}.",
            "## Members",
            table(("member", "state", "note"), members),
            "## Arguments",
            table(("argument", "state", "note"), arguments),
        ]
    )


def member_rows() -> list[tuple[str, str, str]]:
    """Name, state and note of every member."""
    from ds_trainer.training import members
    from ds_trainer.training.trainer import Trainer

    rows = [
        (f"`Trainer.{name}`", ("better" if note else "supported") if hasattr(Trainer, name) else "not yet", note)
        for name, note in members.TRAINER.items()
    ]
    import ds_trainer

    seq2seq = getattr(ds_trainer, "Seq2SeqTrainer", None)
    rows += [
        (f"`Seq2SeqTrainer.{name}`", "supported" if hasattr(seq2seq, name) else "not yet", note)
        for name, note in members.SEQ2SEQ.items()
    ]
    return [(name, state, note if state != "not yet" else "") for name, state, note in rows]


def argument_rows() -> list[tuple[str, str, str]]:
    """Name, state and note of every argument."""
    engine = {limit.field: limit for limit in ENGINE}
    later = {limit.field: limit for limit in LATER}
    topics = Seq2SeqTrainingArguments.topics()
    rows = []
    for field in fields(Seq2SeqTrainingArguments):
        name = field.name
        if name in later:
            partly = callable(later[name].works)
            state = "supported" if partly else "not yet"
            note = f"Not every value yet. {later[name].instead}" if partly else later[name].instead
        elif name in engine:
            partly = callable(engine[name].works) and name not in ("fsdp", "fsdp_config")
            state = "better" if name in BETTER else "supported" if partly else "refused"
            note = BETTER.get(name) or engine[name].instead
        elif topics[name].startswith("For scripts"):
            state, note = "supported", "For scripts; the Trainer does not use it."
        else:
            state, note = ("better", BETTER[name]) if BETTER.get(name) else ("supported", "")
        rows.append((f"`{name}`", state, note))
    return rows

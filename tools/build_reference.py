"""Writes docs/reference/members.md, all members and arguments of the reference: ``python tools/build_reference.py``."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from reference_notes import BETTER, REFERENCE

from ds_trainer.arguments.checks.unsupported import ENGINE
from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.cli.support import table

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "members.md"


def reference_page() -> str:
    """The page as Markdown."""
    members, arguments = member_rows(), argument_rows()
    states = [row[1] for row in (*members, *arguments)]
    total = ", ".join(f"{states.count(state)} {state}" for state in ("supported", "better", "refused", "not yet"))
    return "\n\n".join(
        [
            "# The reference API, member by member",
            "`python tools/build_reference.py` writes this page from the code. The reference is transformers 5, plus "
            "the TensorFlow classes of version 3. *Supported* means as in the reference, *better* names the "
            f"improvement, *refused* names what to use instead. In total: {total}.",
            "## Members",
            table(("member", "state", "description"), members),
            "## Arguments",
            table(("argument", "state", "description"), arguments),
        ]
    )


def member_rows() -> list[tuple[str, str, str]]:
    """Name, state and description of every class and member."""
    import ds_trainer

    rows = []
    for class_name, notes in REFERENCE.items():
        found = getattr(ds_trainer, class_name, None)
        rows.append(_member_row(class_name, found, ""))
        rows += [_member_row(f"{class_name}.{name}", getattr(found, name, None), note) for name, note in notes.items()]
    return rows


def _member_row(name: str, member: Any, note: str) -> tuple[str, str, str]:
    if member is None:
        return f"`{name}`", "not yet", "Not implemented yet."
    return f"`{name}`", "better" if note else "supported", f"{_first_sentence(member)} {note}".rstrip()


def _first_sentence(member: Any) -> str:
    """The first sentence of the docstring, with reStructuredText markup as Markdown."""
    text = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
    text = re.split(r"(?<=[^.]\.) ", text, maxsplit=1)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def argument_rows() -> list[tuple[str, str, str]]:
    """Name, state and description of every argument."""
    rows_of_engine = {row.field: row for row in ENGINE}
    topics = Seq2SeqTrainingArguments.topics()
    rows = []
    for field in fields(Seq2SeqTrainingArguments):
        name = field.name
        if name in rows_of_engine:
            partly = callable(rows_of_engine[name].supported) and name not in ("fsdp", "fsdp_config")
            state = "better" if name in BETTER else "supported" if partly else "refused"
            note = BETTER.get(name) or rows_of_engine[name].instead
        elif topics[name].startswith("For scripts"):
            state, note = "supported", "Not used by the Trainer."
        else:
            state, note = ("better", BETTER[name]) if BETTER.get(name) else ("supported", "")
        rows.append((f"`{name}`", state, f"{field.metadata['help']} {note}".rstrip()))
    return rows


def main() -> None:
    """Write the page."""
    PAGE.write_text(reference_page() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

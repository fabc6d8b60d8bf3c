"""``ds-trainer support``: prints the support matrix."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from ds_trainer.arguments.accelerator_config import EFFECTS
from ds_trainer.arguments.checks.unsupported import ENGINE
from ds_trainer.config.library_optimizer_table import LIBRARY
from ds_trainer.config.optimizer_block import OF_NAME, TYPES
from ds_trainer.config.rules import RULES, Rule
from ds_trainer.config.schema import load_schema
from ds_trainer.utils.errors import ConfigError

HELP = "print what is supported, what is rejected, and what to use instead"
DESCRIPTION = """Print the support matrix from the tables that the checks use: as text in a terminal, otherwise as
Markdown."""


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """This subcommand has no arguments."""


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the matrix and return the exit code."""
    if argv:
        raise ConfigError(f"ds-trainer support: {' '.join(argv)} is not an argument.")
    text = support_matrix()
    if sys.stdout.isatty():
        text = terminal_text(text, min(100, shutil.get_terminal_size().columns))
    print(text)
    return 0


def support_matrix() -> str:
    """The page as Markdown."""
    schema = load_schema()
    parts = [
        "# Support matrix",
        "`ds-trainer support` prints this page from the tables that the checks use. It applies to DeepSpeed "
        f"{schema.version}.",
        "## Combinations",
        "These combinations are rejected before anything starts. The error names values, sources and the remedy.",
    ]
    refusing = [rule for rule in RULES if rule.refuses]
    for topic in dict.fromkeys(rule.topic for rule in refusing):
        parts += [f"### {topic}", _rules(rule for rule in refusing if rule.topic == topic)]
    parts += [
        "### Settings without effect",
        "These are accepted. One warning names them, with keys that DeepSpeed does not read.",
        _rules(rule for rule in RULES if not rule.refuses),
        "## Optimizers",
        "`optim`, or `optimizer.type` in the DeepSpeed file. *Offload*: DeepSpeed has an implementation for host "
        "memory.",
        table(("optim", "optimizer.type", "CPU", "offload", "package"), _optimizers()),
        "### From libraries",
        "This package builds them from the library's class; `optim_args` are those of transformers. *Stage 0 only*: "
        "ZeRO would change the results; stage 0 is then the default.",
        table(("optim", "class", "pip install", "ZeRO", "CPU", "optim_args", "note"), _library()),
        "## Arguments for other engines",
        "Accepted at their defaults, so that scripts run unchanged. Any other value is rejected.",
        table(("argument", "instead"), [(f"`{row.field}`", row.instead) for row in ENGINE]),
        "## Settings of accelerate",
        "All fields of `accelerator_config` are accepted, and can be read on `args.accelerator_config`. Loaders that a "
        "script passes to `accelerator.prepare` follow them as in accelerate; for the Trainer's own:",
        table(("field", "effect"), [(f"`{name}`", text) for name, text in EFFECTS.items()]),
        "## Keys that DeepSpeed removed",
        table(("key", "replacement"), [(f"`{key}`", text) for key, text in schema.removed.items()]),
    ]
    return "\n\n".join(parts)


def terminal_text(markdown: str, width: int) -> str:
    """The page without Markdown: a row of a table is its first cell, and below it the others with their heads."""
    lines: list[str] = []
    heads: list[str] = []
    for line in markdown.replace("`", "").splitlines():
        if not line.startswith("| "):
            heads = []
            plain = re.sub(r"\*(.+?)\*", r"\1", line)
            lines += [plain.lstrip("# ").upper()] if line.startswith("#") else textwrap.wrap(plain, width) or [""]
            continue
        cells = [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not heads:
            heads = cells
        elif set(cells) != {"---"}:
            filled = [(head, cell) for head, cell in zip(heads[1:], cells[1:], strict=True) if cell]
            lines += textwrap.wrap(cells[0] or filled.pop(0)[1], width)
            for head, cell in filled:
                lines += textwrap.wrap(f"{head}: {cell}", width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _rules(rules: Iterable[Rule]) -> str:
    return table(("rule", "reason", "remedy"), [(f"`{rule.name}`", rule.needs, rule.remedy) for rule in rules])


def _optimizers() -> list[tuple[str, ...]]:
    names: dict[str, list[str]] = {}
    for name, kind in OF_NAME.items():
        names.setdefault(kind, []).append(f"`{name}`")
    return [
        (
            ", ".join(names.get(kind.name, [])),
            f"`{kind.name}`",
            "yes" if kind.on_cpu else "no",
            "yes" if kind.offloads else "no",
            kind.package or "",
        )
        for kind in TYPES.values()
    ]


def _library() -> list[tuple[str, ...]]:
    return [
        (
            f"`{name}`",
            f"`{row.cls.replace(':', '.')}`",
            row.package,
            "stage 0 only" if row.stage_0_only else "all stages",
            "yes" if row.on_cpu else "no",
            ", ".join(row.own) or "none",
            "; ".join(text for text in (row.shape, row.note) if text),
        )
        for name, row in LIBRARY.items()
    ]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

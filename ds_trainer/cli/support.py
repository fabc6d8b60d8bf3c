"""``ds-trainer support``: what works, what is refused and what to use instead; the tables of docs/support.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from ds_trainer.arguments.support import ACCELERATOR, ENGINE, Limit
from ds_trainer.config.library_optimizers import LIBRARY
from ds_trainer.config.optimizer_types import OF_NAME, TYPES
from ds_trainer.config.rules import RULES
from ds_trainer.config.schema import load_schema
from ds_trainer.utils.errors import ConfigError

HELP = "print what works, what is refused and what to use instead"
DESCRIPTION = """Print the support matrix as Markdown. It is made from the tables that refuse, so it is always right."""


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """There is nothing to declare."""


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the matrix; gives the exit code."""
    if words:
        raise ConfigError(f"ds-trainer support: {' '.join(words)} is not understood.")
    print(support_matrix())
    return 0


def support_matrix() -> str:
    """The page as Markdown."""
    schema = load_schema()
    parts = [
        "# What works, and what is refused",
        "Made by `ds-trainer support` from the tables that refuse; a test holds this page to them. DeepSpeed "
        f"{schema.version}.",
        "## Combinations",
        "Each row is checked before anything starts. The error names the values, where each came from, and the remedy.",
    ]
    for topic in dict.fromkeys(rule.topic for rule in RULES):
        rows = [(f"`{rule.name}`", rule.needs, rule.remedy) for rule in RULES if rule.topic == topic]
        parts += [f"### {topic}", table(("rule", "why it is refused", "what to change"), rows)]
    parts += [
        "## Optimizers",
        "`optim`, or `optimizer.type` in the DeepSpeed file. Offloaded: DeepSpeed has a version for host memory.",
        table(("optim", "optimizer.type", "on a CPU", "offloaded", "package"), _optimizers()),
        "### From libraries",
        "Built here from the library's class; `optim_args` are those of transformers. Stage 0 only: ZeRO would change "
        "the numbers, so that stage is the default for them.",
        table(("optim", "class", "pip install", "ZeRO", "on a CPU", "optim_args", "note"), _library()),
        "## Arguments of other engines",
        "Accepted at their defaults, so that scripts run unchanged; any other value is refused.",
        table(("argument", "instead"), _limits(ENGINE)),
        "`accelerator_config` likewise:",
        table(("key", "instead"), _limits(ACCELERATOR)),
        "## Keys that DeepSpeed removed",
        table(("key", "what DeepSpeed says"), [(f"`{key}`", text) for key, text in schema.removed.items()]),
    ]
    return "\n\n".join(parts)


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


def _limits(limits: Iterable[Limit]) -> list[tuple[str, ...]]:
    return [(f"`{limit.field}`", limit.instead) for limit in limits]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

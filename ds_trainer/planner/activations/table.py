"""Formulas of activations by model family, read from ``table.json``. Written by ``tools/activation_table.py``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ds_trainer.planner.activations.formula import Activations, Formula

TABLE = Path(__file__).with_name("table.json")


@cache
def activations_of(family: str, attention: str, number_format: str) -> Activations | None:
    """The formulas of a family; None if there are none.

    Args:
        family: ``model_type`` of the configuration.
        attention: ``sdpa`` or ``eager``. FlashAttention keeps what ``sdpa`` keeps.
        number_format: ``bf16`` (also for fp16) or ``fp32``.
    """
    row = _rows().get(f"{family} {attention} {number_format}")
    return None if row is None else from_json(row)


def as_json(found: Activations) -> dict[str, Any]:
    """``found`` as plain data, in a fixed order."""
    moments = {
        name: sorted((_sorted(formula) for formula in getattr(found, name)), key=json.dumps)
        for name in ("forward", "backward", "loss")
    }
    return {"layer": _sorted(found.layer), "outside": _sorted(found.outside), **moments}


def from_json(row: dict[str, Any]) -> Activations:
    """The reverse of :func:`as_json`."""
    moments = {name: tuple(Formula(terms) for terms in row[name]) for name in ("forward", "backward", "loss")}
    return Activations(Formula(row["layer"]), Formula(row["outside"]), **moments)


def _sorted(formula: Formula) -> dict[str, float]:
    return {name: formula.terms[name] for name in sorted(formula.terms)}


@cache
def _rows() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return rows

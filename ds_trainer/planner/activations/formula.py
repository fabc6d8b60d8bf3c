"""``Formula``: bytes of tensors as a sum of products of dimensions.

Tensors of a forward pass are products of a few dimensions of the model and of the batch. So the bytes of all tensors
that a layer keeps are a short sum, exact for all sizes, that can be read off one run with sizes that are told apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

DIMENSIONS = (
    *("hidden", "inner", "queries", "keys", "heads", "key_heads"),
    *("vocabulary", "length", "source", "experts", "active", "one"),
)
"""Width of the residual stream; inner width of the MLP; total width of query heads and of key heads; number of query
heads and of key heads; rows of the vocabulary; positions of a sequence; positions of
the encoder for each position of the decoder; experts of a layer, and those that process a token; 1."""


@dataclass(frozen=True)
class Formula:
    """Bytes per token: the sum of ``coefficient x product of dimensions``.

    Args:
        terms: bytes by product. A product is written ``heads*length``; factors are in :data:`DIMENSIONS`.
    """

    terms: Mapping[str, float] = field(default_factory=dict)

    def bytes_per_token(self, sizes: Mapping[str, float]) -> float:
        """The value for ``sizes``, a number for each of :data:`DIMENSIONS` that occurs."""
        return sum(factor * _product(term, sizes) for term, factor in self.terms.items())

    def __add__(self, other: Formula) -> Formula:
        return _collected([*self.terms.items(), *other.terms.items()])

    def __sub__(self, other: Formula) -> Formula:
        return _collected([*self.terms.items(), *((term, -factor) for term, factor in other.terms.items())])


class BytesPerToken(NamedTuple):
    """The values of :class:`Activations` for a model's sizes: of several moments, that of the largest."""

    layer: float
    forward: float
    backward: float
    loss: float


@dataclass(frozen=True)
class Activations:
    """Formulas for one model.

    Attributes:
        layer: what a layer keeps from its forward until its backward pass.
        outside: what is kept outside of the layers: embeddings, last norm, logits, loss.
        forward: what exists in a layer's forward pass in addition to what existed before it, what it keeps included.
            Several formulas, for moments of which none is always the largest.
        backward: what exists in its backward pass in addition to what existed before it.
        loss: what exists from the end of the last layer's forward pass to the beginning of its backward pass, in
            addition to what existed before.
    """

    layer: Formula
    outside: Formula
    forward: tuple[Formula, ...]
    backward: tuple[Formula, ...]
    loss: tuple[Formula, ...]

    def bytes_per_token(self, sizes: Mapping[str, float]) -> BytesPerToken:
        """The values for ``sizes``, a number for each of :data:`DIMENSIONS`."""
        key = tuple(sizes.values())
        known = self._values.get(key)
        if known is None:  # a search asks thousands of times for a few sizes
            moments = (self.forward, self.backward, self.loss)
            largest = (max(formula.bytes_per_token(sizes) for formula in formulas) for formulas in moments)
            known = self._values[key] = BytesPerToken(self.layer.bytes_per_token(sizes), *largest)
        return known

    @cached_property
    def _values(self) -> dict[tuple[float, ...], BytesPerToken]:
        return {}


def _product(term: str, sizes: Mapping[str, float]) -> float:
    value = 1.0
    for name in term.split("*"):
        value *= 1.0 if name == "one" else sizes[name]
    return value


def _collected(terms: Iterable[tuple[str, float]]) -> Formula:
    factors: dict[str, float] = {}
    for term, factor in terms:
        factors[term] = factors.get(term, 0.0) + factor
    return Formula({term: factor for term, factor in factors.items() if factor})


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


def as_json(activations: Activations) -> dict[str, Any]:
    """``found`` as plain data, in a fixed order."""
    moments = {
        name: sorted((_sorted(formula) for formula in getattr(activations, name)), key=json.dumps)
        for name in ("forward", "backward", "loss")
    }
    return {"layer": _sorted(activations.layer), "outside": _sorted(activations.outside), **moments}


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

"""The formats of samples for embeddings, recognized by their keys: pairs, triplets, pairs with scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ds_trainer.samples.sources.marks import ReadKeys
from ds_trainer.samples.sources.record import BadRecord, Record
from ds_trainer.samples.sources.rows import SourceRow

KIND = "embedding"
PAIRS, TRIPLETS, SCORED = "pairs", "triplets", "pairs with scores"
FORMATS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (SCORED, ("sentence1", "sentence2", "score")),
    (TRIPLETS, ("anchor", "positive", "negative")),
    (TRIPLETS, ("query", "positive", "negative")),
    (TRIPLETS, ("query", "document", "negative")),
    (PAIRS, ("anchor", "positive")),
    (PAIRS, ("query", "positive")),
    (PAIRS, ("query", "document")),
    (PAIRS, ("query", "passage")),
    (PAIRS, ("question", "answer")),
)
"""Names and keys of the formats; the first one whose keys are all in a row is that of the row."""


def embedding_format(value: Any) -> tuple[str, tuple[str, ...]] | None:
    """The format of a row, and its keys; None if it has none."""
    if not isinstance(value, Mapping):
        return None
    return next(((name, keys) for name, keys in FORMATS if all(key in value for key in keys)), None)


def read_row(row: SourceRow) -> Record:
    """The record of a row.

    Raises:
        BadRecord: it has no known format, a text is empty, or a score is no number.
    """
    format = embedding_format(row.value)
    if format is None:
        known = "; ".join(", ".join(keys) for _, keys in FORMATS)
        listed = ", ".join(map(repr, list(row.value)[:12])) if isinstance(row.value, Mapping) else "no mapping"
        raise BadRecord(f"no known format for embeddings; found {listed}. Known: {known}")
    fields: dict[str, Any] = {}
    values = ReadKeys(row.value)
    for key in format[1]:
        value = values[key]
        if key == "score":
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise BadRecord(f"'score' must be a number, got {value!r}")
            value = float(value)
        elif not isinstance(value, str) or not value.strip():
            raise BadRecord(f"{key!r} must be a text that is not empty, got {value!r}")
        fields[key] = value
    return Record(row.where, KIND, fields, values.unread())

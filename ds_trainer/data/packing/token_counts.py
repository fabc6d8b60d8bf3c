"""How many tokens each sample has: the number that packing needs, without padding of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_trainer.data.columns import has_columns
from ds_trainer.data.lengths import stored_lengths
from ds_trainer.utils.errors import ConfigError

TOKENS = "input_ids"
MASK = "attention_mask"
_ROWS_TOGETHER = 10_000


def token_count(sample: Any, index: int | None = None) -> int:
    """Tokens of ``sample`` that its ``attention_mask`` does not exclude.

    Raises:
        ConfigError: it is no mapping with ``input_ids``.
    """
    if not isinstance(sample, Mapping) or TOKENS not in sample:
        which = "a sample of the stream" if index is None else f"sample {index}"
        what = f"has only {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise ConfigError(
            f"packing=True packs samples by their tokens, but {which} has no '{TOKENS}' ({what}). Tokenize the dataset "
            "first, or set packing=False."
        )
    mask = sample.get(MASK)
    return len(sample[TOKENS]) if mask is None else int(np.count_nonzero(np.asarray(mask)))


def token_counts(dataset: Any) -> npt.NDArray[np.int32]:
    """:func:`token_count` of every sample, int32 ``[samples]``. Columns of ``datasets`` are not turned into lists,
    and a dataset that knows its lengths is not read.

    Raises:
        ConfigError: samples have no ``input_ids``.
    """
    if has_columns(dataset) and TOKENS in dataset.column_names and _is_arrow(dataset):
        return _of_arrow(dataset)
    known = stored_lengths(dataset)
    if known is not None:
        return known
    return np.fromiter((token_count(dataset[index], index) for index in range(len(dataset))), np.int32, len(dataset))


def _is_arrow(dataset: Any) -> bool:
    formatted = getattr(dataset, "format", None)
    return hasattr(dataset, "with_format") and isinstance(formatted, Mapping) and formatted.get("type") != "custom"


def _of_arrow(dataset: Any) -> npt.NDArray[np.int32]:
    import pyarrow.compute as pc

    columns = [name for name in (TOKENS, MASK) if name in dataset.column_names]
    tables = dataset.select_columns(columns).with_format("arrow")
    counts = np.empty(len(dataset), np.int32)
    for start in range(0, len(dataset), _ROWS_TOGETHER):
        table = tables[start : start + _ROWS_TOGETHER]
        lengths = pc.list_value_length(table[TOKENS]).to_numpy().astype(np.int64)
        if MASK in columns:
            flags = pc.list_flatten(table[MASK]).to_numpy() != 0
            rows = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(rows[flags], minlength=len(lengths))
        counts[start : start + len(lengths)] = lengths
    return counts

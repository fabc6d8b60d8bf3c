"""Splits a micro-batch into smaller ones by rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_trainer.data.batch_structure import Dummy, DummyBatch, as_dummy, number_of_samples
from ds_trainer.utils import distributed


class NotSplittable(ValueError):
    """A batch whose rows cannot be told apart. The message names the item."""


def split_batch(batch: Any, rows: int, parts: int) -> list[Any]:
    """``parts`` batches of ``rows`` samples each, in order.

    A batch with fewer samples has smaller parts at its end; a part without samples is a dummy batch, so that every
    rank has the same number of parts.

    Raises:
        NotSplittable: the batch is no mapping, or not every item has one entry per sample.
    """
    return [part_of_batch(batch, index * rows, rows) for index in range(parts)]


def part_of_batch(batch: Any, first: int, rows: int) -> Any:
    """The samples ``first`` to ``first + rows - 1`` of ``batch``; see :func:`split_batch`."""
    if not isinstance(batch, Mapping):
        raise NotSplittable(f"a batch is a {type(batch).__name__}, not a dict")
    samples = number_of_samples(batch)
    if first >= samples:
        return DummyBatch(_rows(batch, slice(0, 1), samples, ""))
    part = _rows(batch, slice(first, first + rows), samples, "")
    return DummyBatch(part) if isinstance(batch, DummyBatch) else part


def joined(one: Any, other: Any) -> Any:
    """The samples of two batches as one; None if their tensors have different shapes."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or one.keys() != other.keys():
        return None
    whole = {}
    for key, value in one.items():
        second = other[key]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            whole[key] = value
        elif not isinstance(second, torch.Tensor) or value.shape[1:] != second.shape[1:]:
            return None
        else:
            whole[key] = torch.cat([value, second])
    return whole


def samples_of_batch(batch: Any, samples: list[int]) -> Any:
    """These samples of ``batch``; see :func:`split_batch`.

    Raises:
        NotSplittable: the batch is no mapping, or not every item has one entry per sample.
    """
    if not isinstance(batch, Mapping):
        raise NotSplittable(f"a batch is a {type(batch).__name__}, not a dict")
    return _rows(batch, samples, number_of_samples(batch), "")


def with_equal_rows(batch: Any) -> Any:
    """``batch`` with as many samples as the largest of all ranks, its own repeated. Collective.

    A loss that communicates gathers tensors of equal shapes.

    Raises:
        NotSplittable: see :func:`samples_of_batch`.
    """
    own, dummy = number_of_samples(batch), isinstance(batch, Dummy)
    [most] = distributed.agree(torch.tensor([0 if dummy else own]))
    if most in (0, own):
        return batch
    part = samples_of_batch(batch, [row % own for row in range(most)])
    return as_dummy(part) if dummy else part


def _rows(value: Any, rows: slice | list[int], samples: int, name: str) -> Any:
    from ds_trainer.parallel.deferred_mask import DocumentMask

    if isinstance(value, Mapping):
        return {key: _rows(part, rows, samples, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, torch.Tensor):
        length = value.shape[0] if value.dim() else None
    elif isinstance(value, (list, tuple)):
        length = len(value)
    else:
        length = None
    if length is None:
        return value  # the same for all samples
    if length != samples:
        raise NotSplittable(f"batch{name} has {length} entries for {samples} samples")
    if isinstance(value, DocumentMask):
        if not isinstance(rows, slice):
            raise NotSplittable("a batch of packed rows")
        return value.rows(rows)
    if isinstance(rows, list) and not isinstance(value, torch.Tensor):
        return [value[row] for row in rows]
    return value[rows]

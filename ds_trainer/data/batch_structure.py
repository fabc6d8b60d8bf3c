"""Batches of any structure: what has no effect (a *dummy*), and how many samples a batch has.

A collator may return whatever the methods of a subclass unpack: a dict, a tuple or list of tensors or dicts, a
dataclass, a tensor, any object. A dummy stands in for a replica without samples in an incomplete last micro-step; it is
a batch of the same type, so the model runs on it as on the others, and its results do not count.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ds_trainer.utils.errors import ConfigError


class Dummy:
    """Marks a batch without effect.

    Attributes:
        of: the batch that was marked, if its type is none of this package.
    """

    of: Any = None


class DummyBatch(dict[str, Any], Dummy):
    """A dummy that is a mapping."""


class DummyList(list[Any], Dummy):
    """A dummy that is a list."""


def as_dummy(batch: Any) -> Any:
    """``batch`` as a dummy of its own type; dicts and lists as those of this package.

    Raises:
        ConfigError: an instance of its type cannot be marked.
    """
    if isinstance(batch, Dummy):
        return batch
    kind: Any = type(batch)
    if kind is dict or kind is list:
        return DummyBatch(batch) if kind is dict else DummyList(batch)
    try:
        marked = _dummy_type(kind)
        if isinstance(batch, tuple):
            dummy = tuple.__new__(marked, batch)
        elif isinstance(batch, torch.Tensor):
            dummy = batch.as_subclass(marked)
        elif isinstance(batch, (str, bytes, dict)):
            dummy = marked(batch)
        else:
            dummy = copy.copy(batch)
            object.__setattr__(dummy, "__class__", marked)
        object.__setattr__(dummy, "of", batch)
    except TypeError as error:
        raise ConfigError(
            f"A batch is a {kind.__name__}, and a rank without samples in the last micro-step cannot get one that does "
            f"not count ({error}). Return a dict, a tuple or a dataclass from the data_collator, or set "
            "dataloader_drop_last=True."
        ) from error
    return dummy


@functools.cache
def _dummy_type(kind: type) -> Any:
    return type(f"Dummy{kind.__name__}", (kind, Dummy), {"__reduce_ex__": lambda self, _: (as_dummy, (self.of,))})


class CountedList(list[Any]):
    """A list of a collator, with the number of its samples: they may be its elements, or the rows of its tensors."""

    samples: int


class CountedTuple(tuple[Any, ...]):
    """The same for a tuple."""

    samples: int


def counted(batch: Any, samples: int) -> Any:
    """``batch``, with the number of ``samples`` that were collated if it is a list or tuple."""
    if type(batch) not in (list, tuple):
        return batch
    known = CountedList(batch) if type(batch) is list else CountedTuple(batch)
    known.samples = samples
    return known


def kind_of(batch: Any) -> str:
    """The name of the type of a batch, as its collator returned it."""
    kind = type(batch)
    return (kind.__mro__[1] if kind in (CountedList, CountedTuple) else kind).__name__


def number_of_samples(batch: Any) -> int:
    """Samples of a batch: known from its collation, or the length of the first tensor with dimensions.

    A batch of several inputs, such as ``{"queries": {...}, "passages": {...}}`` or a tuple of them, has the samples of
    the first. Without a tensor it is the length of the first list. A list that no loader of this package has read is a
    list of samples, unless it has tensors of equal length. Without any of these a batch counts as one sample, so that
    its loss counts.
    """
    if isinstance(batch, (CountedList, CountedTuple)) and hasattr(batch, "samples"):
        return batch.samples
    if isinstance(batch, list):
        lengths = {len(part) if isinstance(part, torch.Tensor) and part.dim() else None for part in batch}
        samples = lengths.pop() if len(lengths) == 1 else None
        return len(batch) if samples is None else samples
    rows = _rows(batch)
    if rows is None:
        rows = next((len(value) for value in parts_of(batch) if isinstance(value, (list, tuple))), 1)
    return rows


def parts_of(batch: Any) -> Iterable[Any]:
    """What a batch or a part of it holds directly; nothing for tensors, lists and plain values."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, tuple):
        return batch
    if isinstance(batch, (torch.Tensor, list, type)):
        return ()
    if dataclasses.is_dataclass(batch):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return [value for name, value in getattr(batch, "__dict__", {}).items() if name != "of"]


def _rows(batch: Any) -> int | None:
    """The length of the first tensor with dimensions, or of the parts; None without one."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() > 0 else None
    parts = parts_of(batch)
    for value in parts:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    of_parts = (_rows(value) for value in parts if not isinstance(value, torch.Tensor))
    return next((rows for rows in of_parts if rows is not None), None)

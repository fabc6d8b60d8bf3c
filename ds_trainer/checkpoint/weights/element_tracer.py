"""Traces converted tensors back to their source tensors: boxes of them (``boxes``), or single elements (``trace``).

transformers converts checkpoint tensors to model tensors with operations that move elements without changing them:
stack, concatenate, split, transpose, permute. On meta tensors these operations cost nothing, and their views and copies
can be followed. A part of the result is thus traced to its sources without reading anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.checkpoint.weights.strided_views import Box, StridedView, contiguous_strides

Indices = np.ndarray[Any, np.dtype[np.int64]]


class UntraceableOperation(Exception):
    """A conversion computes with elements, or moves them by an operation that the tracer does not know."""


@dataclass
class _Source:
    name: str


@dataclass
class _Concatenation:
    """A contiguous or dense copy of ``parts``, one after another along ``dim``."""

    parts: list[torch.Tensor]
    dim: int
    result: torch.Tensor


class TracedElements(NamedTuple):
    """Elements that come from one source tensor.

    Attributes:
        name: the source tensor.
        positions: positions within the requested elements.
        indices: indices of the same elements in the flattened source tensor.
    """

    name: str
    positions: Indices
    indices: Indices


class SourceBox(NamedTuple):
    """A box of a traced tensor; its view indexes the elements of ``source``, starting at the source's first one."""

    source: str
    box: Box


class TracedTensor(NamedTuple):
    """The boxes that a tensor consists of."""

    shape: tuple[int, ...]
    parts: list[SourceBox]

    @classmethod
    def of(cls, source: str, shape: Sequence[int], strides: Sequence[int]) -> TracedTensor:
        """Returns a tensor that consists of one whole source."""
        return cls(tuple(shape), [SourceBox(source, Box((0,) * len(shape), StridedView(tuple(shape), tuple(strides))))])


class ElementTracer(TorchDispatchMode):
    """Records the operations on meta tensors while it is active (``with tracer: ...``).

    Raises:
        UntraceableOperation: inside the block, if an operation does more than move elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self._producers: dict[int, _Source | _Concatenation] = {}
        self._references: list[torch.Tensor] = []  # keeps the storages alive: they are identified by address

    def source(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns a meta tensor that stands for the tensor ``name``; without ``strides``, a contiguous one."""
        strides = contiguous_strides(shape) if strides is None else strides
        tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        self._record(tensor, _Source(name))
        return tensor

    def _record(self, tensor: torch.Tensor, producer: _Source | _Concatenation) -> None:
        self._producers[_storage(tensor)] = producer
        self._references.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = list(result) if isinstance(result, (tuple, list)) else [result]
        if all(isinstance(tensor, torch.Tensor) and _storage(tensor) in self._producers for tensor in tensors):
            if func._schema.is_mutable:
                raise UntraceableOperation(str(func))
            return result  # views
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return result  # the shape of a parameter of the model
        packet = func.overloadpacket
        if packet is torch.ops.aten.cat:
            dim = _dimension(args, kwargs, result.dim())
            self._record(result, _Concatenation([part for part in args[0] if part.numel()], dim, result))
        elif packet is torch.ops.aten.stack:
            dim = _dimension(args, kwargs, result.dim())
            with torch.utils._python_dispatch._disable_current_modes():
                parts = [part.unsqueeze(dim) for part in args[0]]
            self._record(result, _Concatenation(parts, dim, result))
        elif packet in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self._record(result, _Concatenation([args[0]], 0, result))
        else:
            raise UntraceableOperation(str(func))
        return result

    def boxes(self, tensor: torch.Tensor) -> TracedTensor:
        """Returns the boxes that ``tensor`` consists of.

        Raises:
            UntraceableOperation: parts of it are no boxes of the sources.
        """
        view = StridedView(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return TracedTensor(view.shape, list(self._boxes(tensor, view, (0,) * tensor.dim())))

    def _boxes(self, owner: torch.Tensor, view: StridedView, origin: tuple[int, ...]) -> Iterator[SourceBox]:
        """Yields the parts of ``view``, a view of the storage of ``owner`` that begins at ``origin`` of the result."""
        producer = self._producers.get(_storage(owner))
        if producer is None:
            raise UntraceableOperation("a tensor that does not come from the files")
        if isinstance(producer, _Source):
            yield SourceBox(producer.name, Box(origin, view))
            return
        result, dim = producer.result, producer.dim
        if 0 in view.shape:
            return
        if result.dim() == 0:
            scalar = producer.parts[0]
            yield from self._boxes(scalar, view._replace(offset=int(scalar.storage_offset())), origin)
            return
        first = [int(axis[0]) for axis in _by_strides(np.array([view.offset]), result)]
        # Each dimension of the view must run along one dimension of the copy.
        by_stride = {stride: each for each, stride in enumerate(result.stride()) if result.shape[each] > 1}
        along = [by_stride.get(step) if size > 1 else None for size, step in zip(*view[:2], strict=True)]
        for size, each in zip(view.shape, along, strict=True):
            if size > 1 and (each is None or along.count(each) > 1 or first[each] + size > result.shape[each]):
                raise UntraceableOperation("a view of a copy that mixes its dimensions")
        cut = along.index(dim) if dim in along else None
        begin, start = first[dim], 0
        end = begin + (1 if cut is None else view.shape[cut])
        for part in producer.parts:
            low, high = max(begin, start), min(end, start + part.shape[dim])
            if low < high:
                shape, within, moved = list(view.shape), list(first), list(origin)
                within[dim] = low - start
                if cut is not None:
                    shape[cut], moved[cut] = high - low, origin[cut] + low - begin
                strides = tuple(0 if each is None else part.stride(each) for each in along)
                offset = int(part.storage_offset()) + sum(map(int.__mul__, within, part.stride()))
                yield from self._boxes(part, StridedView(tuple(shape), strides, offset), tuple(moved))
            start += part.shape[dim]

    def trace(self, tensor: torch.Tensor, indices: Indices) -> Iterator[TracedElements]:
        """Returns the sources of the elements ``indices`` of the flattened ``tensor``.

        Raises:
            UntraceableOperation: an element comes from none of the sources.
        """
        yield from self._trace(tensor, coordinates(indices, tuple(tensor.shape)), np.arange(len(indices)))

    def _trace(self, tensor: torch.Tensor, axes: list[Indices], positions: Indices) -> Iterator[TracedElements]:
        producer = self._producers.get(_storage(tensor))
        if producer is None:
            raise UntraceableOperation("a tensor that does not come from the files")
        offsets = np.full(len(positions), tensor.storage_offset(), dtype=np.int64)
        for axis, stride in zip(axes, tensor.stride(), strict=True):
            offsets += axis * stride
        if isinstance(producer, _Source):
            yield TracedElements(producer.name, positions, offsets)
            return
        axes = _by_strides(offsets, producer.result)
        if producer.result.dim() == 0:
            yield from self._trace(producer.parts[0], axes, positions)
            return
        ends = list(itertools.accumulate(part.shape[producer.dim] for part in producer.parts))
        part_of_element = np.searchsorted(np.asarray(ends), axes[producer.dim], side="right")
        for part in np.unique(part_of_element):
            selected = part_of_element == part
            within = [axis[selected] for axis in axes]
            within[producer.dim] = within[producer.dim] - (ends[part - 1] if part else 0)
            yield from self._trace(producer.parts[part], within, positions[selected])


def coordinates(indices: Indices, shape: tuple[int, ...]) -> list[Indices]:
    """Converts indices of a flattened tensor to one index array per dimension."""
    return [np.asarray(axis, dtype=np.int64) for axis in np.unravel_index(indices, shape)] if shape else []


def _by_strides(offsets: Indices, result: torch.Tensor) -> list[Indices]:
    """Converts storage offsets to one index array per dimension; ``result`` is dense and owns its storage."""
    axes: list[Indices] = [np.zeros_like(offsets)] * result.dim()
    rest = offsets
    strides, shape = result.stride(), result.shape
    for dim in sorted(range(result.dim()), key=lambda dim: strides[dim], reverse=True):
        if shape[dim] > 1:
            axes[dim], rest = np.divmod(rest, strides[dim])
    return axes


def _dimension(args: Any, kwargs: Mapping[str, Any] | None, ndim: int) -> int:
    dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
    return int(dim) % ndim


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Traces each element of a converted tensor back to its source tensor.

transformers converts checkpoint tensors to model tensors with operations that move elements without changing them:
stack, concatenate, split, transpose, permute. On meta tensors these operations cost nothing, and their views and copies
can be followed. An element of the result is thus traced to its source without reading any other element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class ElementTracer(TorchDispatchMode):
    """Records the operations on meta tensors while it is active (``with tracer: ...``).

    Raises:
        UntraceableOperation: inside the block, if an operation does more than move elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self._producers: dict[int, _Source | _Concatenation] = {}
        self._references: list[torch.Tensor] = []  # keeps the storages alive: they are identified by address

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a meta tensor that stands for the tensor ``name``."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
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

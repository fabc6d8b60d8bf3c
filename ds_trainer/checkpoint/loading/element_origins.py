"""Which element of which tensor each element of a converted tensor is.

transformers converts the tensors of a file into those of a model by operations that move elements and do not change
them: stack, concatenate, split, transpose, permute. Run on meta tensors, they cost nothing and their views and copies
can be followed, so that an element of the result is traced back to where it came from without reading anything else.
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


class UnknownOperation(Exception):
    """A conversion computes with the elements, or moves them in a way that is not followed."""


@dataclass
class _Source:
    name: str


@dataclass
class _Joined:
    """A contiguous or dense copy of ``parts``, one after another along ``dim``."""

    parts: list[torch.Tensor]
    dim: int
    result: torch.Tensor


class Origin(NamedTuple):
    """Elements that come from one tensor.

    Attributes:
        name: of that tensor.
        asked: positions in what was asked for.
        indices: of the same elements in the flattened tensor.
    """

    name: str
    asked: Indices
    indices: Indices


class ElementOrigins(TorchDispatchMode):
    """Follows elements while it is active (``with origins: ...``).

    Raises:
        UnknownOperation: inside, where an operation does more than to move elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made_by: dict[int, _Source | _Joined] = {}
        self._kept: list[torch.Tensor] = []  # the memory of meta tensors is known by its address: none may go

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A meta tensor that stands for the tensor ``name``."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._note(tensor, _Source(name))
        return tensor

    def _note(self, tensor: torch.Tensor, made_by: _Source | _Joined) -> None:
        self._made_by[_memory(tensor)] = made_by
        self._kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = list(result) if isinstance(result, (tuple, list)) else [result]
        if all(isinstance(tensor, torch.Tensor) and _memory(tensor) in self._made_by for tensor in tensors):
            if func._schema.is_mutable:
                raise UnknownOperation(str(func))
            return result  # views
        packet = func.overloadpacket
        if packet is torch.ops.aten.cat:
            dim = _dimension(args, kwargs, result.dim())
            self._note(result, _Joined([part for part in args[0] if part.numel()], dim, result))
        elif packet is torch.ops.aten.stack:
            dim = _dimension(args, kwargs, result.dim())
            with torch.utils._python_dispatch._disable_current_modes():
                parts = [part.unsqueeze(dim) for part in args[0]]
            self._note(result, _Joined(parts, dim, result))
        elif packet in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self._note(result, _Joined([args[0]], 0, result))
        else:
            raise UnknownOperation(str(func))
        return result

    def of(self, tensor: torch.Tensor, indices: Indices) -> Iterator[Origin]:
        """Where the elements ``indices`` of the flattened ``tensor`` come from.

        Raises:
            UnknownOperation: from none of the sources.
        """
        yield from self._of(tensor, coordinates(indices, tuple(tensor.shape)), np.arange(len(indices)))

    def _of(self, tensor: torch.Tensor, at: list[Indices], asked: Indices) -> Iterator[Origin]:
        made_by = self._made_by.get(_memory(tensor))
        if made_by is None:
            raise UnknownOperation("a tensor that is made of nothing in the files")
        offsets = np.full(len(asked), tensor.storage_offset(), dtype=np.int64)
        for axis, stride in zip(at, tensor.stride(), strict=True):
            offsets += axis * stride
        if isinstance(made_by, _Source):
            yield Origin(made_by.name, asked, offsets)
            return
        there = _by_strides(offsets, made_by.result)
        if made_by.result.dim() == 0:
            yield from self._of(made_by.parts[0], there, asked)
            return
        ends = list(itertools.accumulate(part.shape[made_by.dim] for part in made_by.parts))
        which = np.searchsorted(np.asarray(ends), there[made_by.dim], side="right")
        for number in np.unique(which):
            mine = which == number
            within = [axis[mine] for axis in there]
            within[made_by.dim] = within[made_by.dim] - (ends[number - 1] if number else 0)
            yield from self._of(made_by.parts[number], within, asked[mine])


def coordinates(indices: Indices, shape: tuple[int, ...]) -> list[Indices]:
    """Elements of a flattened tensor as one index for each dimension."""
    return [np.asarray(axis, dtype=np.int64) for axis in np.unravel_index(indices, shape)] if shape else []


def _by_strides(offsets: Indices, result: torch.Tensor) -> list[Indices]:
    """The indices of elements at ``offsets`` of the memory of ``result``, which is dense and has it alone."""
    found: list[Indices] = [np.zeros_like(offsets)] * result.dim()
    rest = offsets
    strides, shape = result.stride(), result.shape
    for dim in sorted(range(result.dim()), key=lambda dim: strides[dim], reverse=True):
        if shape[dim] > 1:
            found[dim], rest = np.divmod(rest, strides[dim])
    return found


def _dimension(args: Any, kwargs: Mapping[str, Any] | None, of: int) -> int:
    dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
    return int(dim) % of


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

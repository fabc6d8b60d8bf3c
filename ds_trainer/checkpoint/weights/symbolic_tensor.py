"""Tensors that record where their elements lie in other tensors and hold no elements.

transformers converts weights while loading: it stacks experts and concatenates gate and up projections. Its operations
call a few torch functions. Applied to a :class:`SymbolicTensor`, they compute locations instead of values: which
elements of which sources the result consists of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ds_trainer.checkpoint.weights.strided_views import Box, StridedView


class NotSymbolicError(TypeError):
    """An unknown operation, or one that does not fit the shapes; the real computation reports the cause."""


class Part(NamedTuple):
    """A box of a symbolic tensor; its view indexes the elements of ``source``, starting at the source's first one."""

    source: str
    box: Box


class SymbolicTensor:
    """A tensor that consists of parts of source tensors.

    It supports ``torch.stack``, ``cat``, ``chunk``, ``split``, ``narrow``, ``squeeze`` and ``transpose``, and no other
    operation.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        self.shape = torch.Size(shape)
        self.parts = list(parts)

    @classmethod
    def of(cls, source: str, shape: Sequence[int], strides: Sequence[int]) -> SymbolicTensor:
        """Returns a tensor that consists of one whole source."""
        return cls(shape, [Part(source, Box((0,) * len(shape), StridedView(tuple(shape), tuple(strides))))])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> SymbolicTensor:
        """The tensor itself: its layout is symbolic."""
        return self

    def squeeze(self, dim: int | None = None) -> SymbolicTensor:
        """The tensor without dimension ``dim``, or without any, of size 1."""
        if dim is not None:
            return _squeezed(self, dim)
        ones = [axis for axis, size in enumerate(self.shape) if size == 1]
        return functools.reduce(_squeezed, reversed(ones), self)  # from the last, so that the others keep their number

    def __getitem__(self, index: Any) -> SymbolicTensor:
        if index is not Ellipsis:
            raise NotSymbolicError(f"index {index}")
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = _FUNCTIONS.get(function)
        if known is None:
            raise NotSymbolicError(getattr(function, "__name__", str(function)))
        return known(*args, **(kwargs or {}))


def _dimension(dim: int, count: int) -> int:
    if not -count <= dim < count:
        raise NotSymbolicError(f"dimension {dim} of a tensor that has {count}")
    return dim % count


def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    _all_symbolic(tensors)
    first = tensors[0].shape
    dim = _dimension(dim, len(first))
    parts, position = [], 0
    for tensor in tensors:
        if len(tensor.shape) != len(first) or any(
            a != b for axis, (a, b) in enumerate(zip(tensor.shape, first, strict=True)) if axis != dim
        ):
            raise NotSymbolicError(f"tensors of {list(first)} and {list(tensor.shape)} are concatenated along {dim}")
        for source, (origin, view) in tensor.parts:
            moved = (*origin[:dim], origin[dim] + position, *origin[dim + 1 :])
            parts.append(Part(source, Box(moved, view)))
        position += tensor.shape[dim]
    return SymbolicTensor((*first[:dim], position, *first[dim + 1 :]), parts)


def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    _all_symbolic(tensors)
    dim = _dimension(dim, tensors[0].ndim + 1)
    if len({tensor.shape for tensor in tensors}) > 1:
        raise NotSymbolicError(f"tensors of {sorted({tuple(tensor.shape) for tensor in tensors})} are stacked")
    return _cat([_unsqueezed(tensor, dim) for tensor in tensors], dim)


def _unsqueezed(tensor: SymbolicTensor, dim: int) -> SymbolicTensor:
    parts = [
        Part(source, Box((*origin[:dim], 0, *origin[dim:]), view.unsqueeze(dim)))
        for source, (origin, view) in tensor.parts
    ]
    return SymbolicTensor((*tensor.shape[:dim], 1, *tensor.shape[dim:]), parts)


def _squeezed(tensor: SymbolicTensor, dim: int) -> SymbolicTensor:
    dim = _dimension(dim, tensor.ndim)
    if tensor.shape[dim] != 1:
        return tensor
    parts = [
        Part(source, Box((*origin[:dim], *origin[dim + 1 :]), view.squeeze(dim)))
        for source, (origin, view) in tensor.parts
    ]
    return SymbolicTensor((*tensor.shape[:dim], *tensor.shape[dim + 1 :]), parts)


def _narrow(tensor: SymbolicTensor, dim: int, start: int, length: int) -> SymbolicTensor:
    dim = _dimension(dim, tensor.ndim)
    parts = []
    for source, (origin, view) in tensor.parts:
        first = origin[dim]
        low, high = max(start, first), min(start + length, first + view.shape[dim])
        if low < high:
            moved = (*origin[:dim], low - start, *origin[dim + 1 :])
            parts.append(Part(source, Box(moved, view.narrow(dim, low - first, high - low))))
    return SymbolicTensor((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]), parts)


def _split(tensor: SymbolicTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Any:
    dim = _dimension(dim, tensor.ndim)
    stand_in = torch.empty(tensor.shape[dim], device="meta")
    parts, start = [], 0
    for part in torch.split(stand_in, split_size_or_sections):  # type: ignore[arg-type]
        parts.append(_narrow(tensor, dim, start, len(part)))
        start += len(part)
    return tuple(parts)


def _chunk(input: SymbolicTensor, chunks: int, dim: int = 0) -> Any:
    sizes = [len(part) for part in torch.empty(input.shape[dim], device="meta").chunk(chunks)]
    return _split(input, sizes, dim)


def _transpose(input: SymbolicTensor, dim0: int, dim1: int) -> SymbolicTensor:
    order = list(range(input.ndim))
    dim0, dim1 = _dimension(dim0, input.ndim), _dimension(dim1, input.ndim)
    order[dim0], order[dim1] = order[dim1], order[dim0]
    parts = [
        Part(source, Box(tuple(origin[axis] for axis in order), view.permute(order)))
        for source, (origin, view) in input.parts
    ]
    return SymbolicTensor([input.shape[axis] for axis in order], parts)


def _all_symbolic(tensors: Sequence[Any]) -> None:
    if not all(isinstance(tensor, SymbolicTensor) for tensor in tensors):
        raise NotSymbolicError("a mix of symbolic and real tensors")


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.narrow: _narrow,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}

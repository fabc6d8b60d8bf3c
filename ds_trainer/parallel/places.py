"""Where a piece of a tensor lies in the whole one, and what two pieces have in common. Pure arithmetic.

Tensor parallelism cuts a tensor along one dimension into slices (of a fused weight, into several bands each). ZeRO
cuts the flattened slice into runs. So a piece is a run of elements of a slice, and any two pieces of one tensor, of
whatever layouts, share a few rectangles: a reader needs no more of a file than what it will hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Rectangle(NamedTuple):
    """``rows`` x ``columns`` elements, at ``offset`` of a flat tensor whose rows are ``stride`` elements apart."""

    rows: int
    columns: int
    offset: int
    stride: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of ``flat``, as a view ``[rows, columns]``."""
        return flat.as_strided((self.rows, self.columns), (self.stride, 1), flat.storage_offset() + self.offset)


class _Block(NamedTuple):
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of the whole matrix, and where they begin in the piece."""

    top: int
    bottom: int
    left: int
    right: int
    start: int


@dataclass(frozen=True)
class Place:
    """Elements ``[start, stop)`` of the flattened slice of a tensor.

    Attributes:
        shape: shape of the whole tensor.
        start, stop: the run of elements, counted in the flattened slice.
        dim: the dimension that is cut; None where the slice is the whole tensor.
        bands: what the slice holds of it: ``(first index, number of indices)`` of each band, in the slice's order.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    dim: int | None = None
    bands: tuple[tuple[int, int], ...] = ()

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        """All elements of a tensor that is not cut."""
        return cls(tuple(shape), 0, math.prod(shape))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice_numel(self) -> int:
        """Elements of the whole slice."""
        return math.prod(self.slice_shape)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.dim is None:
            return self.shape
        width = sum(length for _, length in self.bands)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def run(self, start: int, stop: int) -> Place:
        """Elements ``[start, stop)`` of the same slice."""
        return Place(self.shape, start, stop, self.dim, self.bands)

    def share(self, index: int, count: int) -> Place:
        """The ``index``-th of ``count`` nearly equal parts of this run."""
        size = len(self)
        return self.run(self.start + size * index // count, self.start + size * (index + 1) // count)

    def to_json(self) -> list[Any]:
        """As plain data."""
        return [list(self.shape), self.start, self.stop, self.dim, [list(band) for band in self.bands]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Place:
        """What :meth:`to_json` gave."""
        shape, start, stop, dim, bands = value
        return cls(tuple(shape), start, stop, dim, tuple((first, length) for first, length in bands))

    def locate(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which elements of the whole tensor this run holds, and where.

        Args:
            indices: of elements of the flattened whole tensor, int64 ``[n]``.

        Returns:
            Which of ``indices`` are here (positions in ``indices``), and where in this run: int64 ``[m]`` both.
        """
        at = indices
        if self.dim is not None:
            size, inner = self.shape[self.dim], math.prod(self.shape[self.dim + 1 :])
            outer, middle, column = indices // (size * inner), indices // inner % size, indices % inner
            width = sum(length for _, length in self.bands)
            at, before = torch.full_like(indices, -1), 0
            for first, length in self.bands:
                inside = (middle >= first) & (middle < first + length)
                at = torch.where(inside, (outer * width + before + middle - first) * inner + column, at)
                before += length
        which = ((at >= self.start) & (at < self.stop)).nonzero().reshape(-1)
        return which, at[which] - self.start

    def _blocks(self, dim: int | None) -> Iterator[_Block]:
        """The run as blocks of the whole matrix whose rows are the indices before ``dim``."""
        inner = 1 if dim is None else math.prod(self.shape[dim + 1 :])
        everything = math.prod(self.shape) if dim is None else self.shape[dim]
        bands = ((0, everything),) if self.dim is None else self.bands
        width = sum(length for _, length in bands) * inner
        if width == 0:
            return
        position = self.start
        while position < self.stop:
            row, column = divmod(position, width)
            if column or self.stop - position < width:
                rows, end = 1, min(width, column + self.stop - position)
            else:
                rows, end = (self.stop - position) // width, width
            before = 0
            for first, length in bands:
                left, right = max(column, before), min(end, before + length * inner)
                if left < right:
                    shift = first * inner - before
                    start = position - self.start + left - column
                    yield _Block(row, row + rows, left + shift, right + shift, start)
                before += length * inner
            position += rows * (end - column)

    def _stride(self, dim: int | None) -> int:
        inner = 1 if dim is None else math.prod(self.shape[dim + 1 :])
        if self.dim is not None:
            return sum(length for _, length in self.bands) * inner
        return (math.prod(self.shape) if dim is None else self.shape[dim]) * inner

    def common(self, other: Place) -> Iterator[tuple[Rectangle, Rectangle]]:
        """What both hold: pairs of rectangles, the first in this run's elements, the second in those of ``other``.

        Raises:
            ValueError: they are pieces of tensors of different shapes, or slices along different dimensions.
        """
        if self.shape != other.shape:
            raise ValueError(f"pieces of tensors of different shapes: {self.shape} and {other.shape}")
        if None not in (self.dim, other.dim) and self.dim != other.dim:
            raise ValueError(f"slices along different dimensions: {self.dim} and {other.dim}")
        dim = self.dim if self.dim is not None else other.dim
        mine, theirs = self._stride(dim), other._stride(dim)
        their_blocks = list(other._blocks(dim))
        for a in self._blocks(dim):
            for b in their_blocks:
                top, bottom = max(a.top, b.top), min(a.bottom, b.bottom)
                left, right = max(a.left, b.left), min(a.right, b.right)
                if top < bottom and left < right:
                    size = (bottom - top, right - left)
                    yield (
                        Rectangle(*size, a.start + (top - a.top) * mine + left - a.left, mine),
                        Rectangle(*size, b.start + (top - b.top) * theirs + left - b.left, theirs),
                    )


def copy_common(target: torch.Tensor, wanted: Place, source: torch.Tensor, given: Place) -> int:
    """Copy what both pieces hold from ``source`` to ``target`` (flat tensors); how many elements that were."""
    copied = 0
    for there, here in wanted.common(given):
        there.of(target).copy_(here.of(source))
        copied += there.rows * there.columns
    return copied

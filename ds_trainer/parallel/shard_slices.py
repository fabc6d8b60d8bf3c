"""``ShardSlice``: which elements of a tensor a shard holds, and which elements two shards have in common.

Tensor parallelism partitions a tensor along one dimension (a fused weight into several bands per rank). ZeRO divides
the flattened partition into contiguous runs. So a shard is a run of elements of a partition, and any two shards of one
tensor, from any two layouts, overlap in a few rectangles: a reader reads only the elements it will hold. Pure
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Rectangle(NamedTuple):
    """``rows`` x ``columns`` elements at ``offset`` of a flat tensor whose rows are ``stride`` elements apart."""

    rows: int
    columns: int
    offset: int
    stride: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns these elements of ``flat`` as a view ``[rows, columns]``."""
        return flat.as_strided((self.rows, self.columns), (self.stride, 1), flat.storage_offset() + self.offset)


class _Block(NamedTuple):
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of the full matrix, and their first element in the shard."""

    top: int
    bottom: int
    left: int
    right: int
    start: int


@dataclass(frozen=True)
class ShardSlice:
    """Elements ``[start, stop)`` of the flattened slice that a tensor-parallel rank holds of a tensor.

    Attributes:
        shape: shape of the full tensor.
        start, stop: the run of elements, as indices into the flattened slice.
        dim: the partitioned dimension; None if the slice is the full tensor.
        bands: the indices along ``dim`` in the slice: ``(first index, number of indices)`` of each band, in the slice's
            order.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    dim: int | None = None
    bands: tuple[tuple[int, int], ...] = ()

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardSlice:
        """All elements of a tensor that is not partitioned."""
        return cls(tuple(shape), 0, math.prod(shape))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice_numel(self) -> int:
        """Number of elements of the slice, of which this is a run."""
        return math.prod(self.slice_shape)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.dim is None:
            return self.shape
        width = sum(length for _, length in self.bands)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def run(self, start: int, stop: int) -> ShardSlice:
        """Returns elements ``[start, stop)`` of the same slice."""
        return ShardSlice(self.shape, start, stop, self.dim, self.bands)

    def part(self, index: int, count: int) -> ShardSlice:
        """Returns the ``index``-th of ``count`` nearly equal parts of this run."""
        size = len(self)
        return self.run(self.start + size * index // count, self.start + size * (index + 1) // count)

    def to_json(self) -> list[Any]:
        """Returns the fields as JSON values."""
        return [list(self.shape), self.start, self.stop, self.dim, [list(band) for band in self.bands]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> ShardSlice:
        """The inverse of :meth:`to_json`."""
        shape, start, stop, dim, bands = value
        return cls(tuple(shape), start, stop, dim, tuple((first, length) for first, length in bands))

    def locate(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds elements of the full tensor in this run.

        Args:
            indices: indices into the flattened full tensor, int64 ``[n]``.

        Returns:
            The positions in ``indices`` of the elements that this run holds, and their positions in this run: int64
            ``[m]`` each.
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
        """Yields the run as blocks of the full matrix whose rows are the indices before ``dim``."""
        inner = 1 if dim is None else math.prod(self.shape[dim + 1 :])
        size = math.prod(self.shape) if dim is None else self.shape[dim]
        bands = ((0, size),) if self.dim is None else self.bands
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

    def common(self, other: ShardSlice) -> Iterator[tuple[Rectangle, Rectangle]]:
        """Yields the overlap as pairs of rectangles, the first in this run's elements, the second in ``other``'s.

        Raises:
            ValueError: the full shapes differ, or the slices are along different dimensions.
        """
        if self.shape != other.shape:
            raise ValueError(f"shards of tensors of different shapes: {self.shape} and {other.shape}")
        if None not in (self.dim, other.dim) and self.dim != other.dim:
            raise ValueError(f"slices along different dimensions: {self.dim} and {other.dim}")
        dim = self.dim if self.dim is not None else other.dim
        stride, other_stride = self._stride(dim), other._stride(dim)
        other_blocks = list(other._blocks(dim))
        for a in self._blocks(dim):
            for b in other_blocks:
                top, bottom = max(a.top, b.top), min(a.bottom, b.bottom)
                left, right = max(a.left, b.left), min(a.right, b.right)
                if top < bottom and left < right:
                    size = (bottom - top, right - left)
                    yield (
                        Rectangle(*size, a.start + (top - a.top) * stride + left - a.left, stride),
                        Rectangle(*size, b.start + (top - b.top) * other_stride + left - b.left, other_stride),
                    )


def copy_common(target: torch.Tensor, target_slice: ShardSlice, source: torch.Tensor, source_slice: ShardSlice) -> int:
    """Copies the common elements of two shards from ``source`` to ``target`` (flat tensors).

    Returns:
        The number of copied elements.
    """
    copied = 0
    for to, origin in target_slice.common(source_slice):
        to.of(target).copy_(origin.of(source))
        copied += to.rows * to.columns
    return copied

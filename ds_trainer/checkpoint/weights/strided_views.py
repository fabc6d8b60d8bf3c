"""Boxes of a tensor, the strided elements of memory or of a file that they cover, and the boxes of a shard slice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_trainer.parallel.shard_slices import ShardSlice


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor (row-major)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class StridedView(NamedTuple):
    """A strided view of a flat tensor, without its data. Strides and offset count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Distance from the first to the last element, inclusive."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def permute(self, order: Sequence[int]) -> StridedView:
        """Returns the view with its dimensions reordered."""
        return StridedView(tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order), self.offset)

    def box(self, origin: Sequence[int], shape: Sequence[int]) -> StridedView:
        """Returns the part of ``shape`` that starts at index ``origin``."""
        distance = sum(first * stride for first, stride in zip(origin, self.strides, strict=True))
        return StridedView(tuple(shape), self.strides, self.offset + distance)

    def narrow(self, dim: int, start: int, length: int) -> StridedView:
        """Returns the indices ``[start, start + length)`` of one dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return StridedView(shape, self.strides, self.offset + start * self.strides[dim])


class Box(NamedTuple):
    """A box of a tensor: its first index, and a view of its elements."""

    origin: tuple[int, ...]
    view: StridedView

    def common(self, other: Box) -> tuple[StridedView, StridedView] | None:
        """Returns the common elements of both boxes, as a view of each; None if there are none."""
        low = tuple(map(max, self.origin, other.origin))
        high = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.origin, self.view.shape, other.origin, other.view.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        if min(shape, default=1) <= 0:
            return None
        own_start = [at - first for at, first in zip(low, self.origin, strict=True)]
        other_start = [at - first for at, first in zip(low, other.origin, strict=True)]
        return self.view.box(own_start, shape), other.view.box(other_start, shape)


def boxes_of(shard_slice: ShardSlice) -> Iterator[Box]:
    """Yields the boxes of the whole tensor that a slice consists of; their views index the slice's flat elements."""
    shape = shard_slice.slice_shape
    strides = contiguous_strides(shape)
    for origin, size in _boxes_of_run(shape, strides, shard_slice.start, shard_slice.stop):
        view = StridedView(size, strides, sum(map(int.__mul__, origin, strides)) - shard_slice.start)
        yield from _boxes_of_whole(shard_slice, Box(origin, view))


def _boxes_of_run(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields boxes that cover elements ``[start, stop)`` of a flattened tensor: first index and shape of each."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    step, inner = strides[0], shape[1:]
    first, last = -(-start // step), stop // step
    if first > last:  # within one index of the first dimension
        first = last = stop // step
        for origin, size in _boxes_of_run(inner, strides[1:], start - last * step, stop - last * step):
            yield (last, *origin), (1, *size)
        return
    if start < first * step:
        for origin, size in _boxes_of_run(inner, strides[1:], start - (first - 1) * step, step):
            yield (first - 1, *origin), (1, *size)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if last * step < stop:
        for origin, size in _boxes_of_run(inner, strides[1:], 0, stop - last * step):
            yield (last, *origin), (1, *size)


def _boxes_of_whole(shard_slice: ShardSlice, box: Box) -> Iterator[Box]:
    """Converts a box of the slice to boxes of the whole tensor, one per band."""
    if shard_slice.dim is None:
        yield box
        return
    dim, begin = shard_slice.dim, 0
    for first, length in shard_slice.bands:
        low = max(begin, box.origin[dim])
        high = min(begin + length, box.origin[dim] + box.view.shape[dim])
        if low < high:
            origin = (*box.origin[:dim], first + low - begin, *box.origin[dim + 1 :])
            yield Box(origin, box.view.narrow(dim, low - box.origin[dim], high - low))
        begin += length


def coalesced(views: Iterable[StridedView]) -> tuple[StridedView, ...]:
    """Returns views of equal shape with as few dimensions as possible, by decreasing strides of the first view."""
    first, *others = views
    axes = [axis for axis, size in enumerate(first.shape) if size != 1]
    axes.sort(key=lambda axis: -first.strides[axis])
    all_views = [view.permute(axes) for view in (first, *others)]
    dims: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(all_views[0].shape):
        strides = tuple(view.strides[axis] for view in all_views)
        if dims and all(outer == inner * size for outer, inner in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    shape = tuple(size for size, _ in dims)
    return tuple(
        StridedView(shape, tuple(strides[number] for _, strides in dims), view.offset)
        for number, view in enumerate(all_views)
    )

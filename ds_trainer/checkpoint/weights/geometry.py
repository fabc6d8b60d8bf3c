"""Boxes of a tensor, the elements of memory or of a file that they are, and the boxes that a place consists of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_trainer.parallel.places import Place


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last dimension runs fastest, without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class View(NamedTuple):
    """Elements of a flat tensor as a box: as a strided tensor, without its elements. Counted in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first one to the last one, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def unsqueeze(self, dim: int) -> View:
        """With one more dimension of size 1."""
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return View(shape, (*self.strides[:dim], 0, *self.strides[dim:]), self.offset)

    def squeeze(self, dim: int) -> View:
        """Without a dimension of size 1."""
        return View(
            (*self.shape[:dim], *self.shape[dim + 1 :]), (*self.strides[:dim], *self.strides[dim + 1 :]), self.offset
        )

    def permute(self, order: Sequence[int]) -> View:
        """With the dimensions in another order."""
        return View(tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order), self.offset)

    def box(self, origin: Sequence[int], shape: Sequence[int]) -> View:
        """The part that begins at the index ``origin``."""
        ahead = sum(first * stride for first, stride in zip(origin, self.strides, strict=True))
        return View(tuple(shape), self.strides, self.offset + ahead)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """Indices ``[start, start + length)`` of one dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(shape, self.strides, self.offset + start * self.strides[dim])


class Box(NamedTuple):
    """A box of a tensor: its first index, and where its elements lie."""

    origin: tuple[int, ...]
    view: View

    def common(self, other: Box) -> tuple[View, View] | None:
        """The elements that both have, as each of them has them."""
        low = tuple(map(max, self.origin, other.origin))
        high = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.origin, self.view.shape, other.origin, other.view.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        if min(shape, default=1) <= 0:
            return None
        mine = [at - first for at, first in zip(low, self.origin, strict=True)]
        theirs = [at - first for at, first in zip(low, other.origin, strict=True)]
        return self.view.box(mine, shape), other.view.box(theirs, shape)


def boxes_of(place: Place) -> Iterator[Box]:
    """The boxes of the whole tensor that a place consists of; their views are of the place's flat elements."""
    shape = place.slice_shape
    strides = contiguous_strides(shape)
    for origin, size in _boxes_of_run(shape, strides, place.start, place.stop):
        view = View(size, strides, sum(map(int.__mul__, origin, strides)) - place.start)
        yield from _in_the_whole(place, Box(origin, view))


def _boxes_of_run(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``[start, stop)`` of a flattened tensor as boxes: first index and shape of each."""
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


def _in_the_whole(place: Place, box: Box) -> Iterator[Box]:
    """A box of the slice as boxes of the whole tensor, one for each band."""
    if place.dim is None:
        yield box
        return
    dim, begin = place.dim, 0
    for first, length in place.bands:
        low = max(begin, box.origin[dim])
        high = min(begin + length, box.origin[dim] + box.view.shape[dim])
        if low < high:
            origin = (*box.origin[:dim], first + low - begin, *box.origin[dim + 1 :])
            yield Box(origin, box.view.narrow(dim, low - box.origin[dim], high - low))
        begin += length


def coalesced(views: Iterable[View]) -> tuple[View, ...]:
    """Views of equal shape with as few dimensions as possible, ordered by falling strides of the first view."""
    first, *others = views
    axes = [axis for axis, size in enumerate(first.shape) if size != 1]
    axes.sort(key=lambda axis: -first.strides[axis])
    all_views = [view.permute(axes) for view in (first, *others)]
    kept: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(all_views[0].shape):
        strides = tuple(view.strides[axis] for view in all_views)
        if kept and all(outer == inner * size for outer, inner in zip(kept[-1][1], strides, strict=True)):
            kept[-1] = (kept[-1][0] * size, strides)
        else:
            kept.append((size, strides))
    shape = tuple(size for size, _ in kept)
    return tuple(
        View(shape, tuple(strides[number] for _, strides in kept), view.offset) for number, view in enumerate(all_views)
    )

"""What an initialization does to one tensor: operations on its elements, each by itself, or something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class View:
    """Which elements of a flat tensor an operation changes; all where ``size`` is None."""

    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """First element, and one behind the last."""
        assert self.size is not None
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + last + 1

    @property
    def has_holes(self) -> bool:
        """Whether elements between its first and its last do not belong to it."""
        assert self.size is not None
        first, behind = self.span
        return math.prod(self.size) != behind - first

    def mask(self, start: int, stop: int) -> torch.Tensor | None:
        """Which of the elements ``[start, stop)`` belong to it; None for none of them."""
        assert self.size is not None
        first, behind = self.span
        if behind <= start or stop <= first:
            return None
        rest = torch.arange(start - self.offset, stop - self.offset)
        inside = rest >= 0
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda dim: -dim[1]):
            index = rest.div(stride, rounding_mode="floor")
            inside &= index < size
            rest -= index * stride
        return inside & (rest == 0)


class Step(NamedTuple):
    """An operation in place on the elements of ``view``, each by itself.

    ``kind`` is ``random``, ``constant``, ``elementwise``, or ``value``: the numbers themselves, as the flat tensor
    ``arguments[0]``.
    """

    kind: str
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    view: View


class Computed(NamedTuple):
    """Something that is no operation on each element by itself, such as an orthogonal matrix.

    ``sources`` are what the numbers come from: names of tensors, and numbers that stand for random draws.
    """

    sources: frozenset[str | int]


@dataclass
class TensorRecord:
    """What the initialization does to one tensor, since it was last overwritten."""

    dtype: torch.dtype
    numel: int
    steps: list[Step | Computed] = field(default_factory=list)

    @property
    def initialized(self) -> bool:
        """Whether every element gets a number; what is computed shows that when it is."""
        if self.computed or self.numel == 0:
            return True
        reached = 0
        overwritten = [step.view for step in self.steps if isinstance(step, Step) and step.kind != "elementwise"]
        for start, stop in sorted((0, self.numel) if view.size is None else view.span for view in overwritten):
            if start > reached:
                return False
            reached = max(reached, stop)
        return reached == self.numel

    @property
    def computed(self) -> bool:
        """Whether it can only be done to the whole tensor."""
        return any(isinstance(step, Computed) for step in self.steps)

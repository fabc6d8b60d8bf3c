"""The recorded initialization of one tensor: elementwise steps, or computations on the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Region:
    """The elements of a flat tensor that an operation changes, as a strided view; all if ``size`` is None."""

    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """First element, and one past the last."""
        assert self.size is not None
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + last + 1

    @property
    def has_holes(self) -> bool:
        """Whether some elements between its first and last do not belong to it."""
        assert self.size is not None
        first, end = self.span
        return math.prod(self.size) != end - first

    def mask(self, start: int, stop: int) -> torch.Tensor | None:
        """Returns a boolean mask of the elements ``[start, stop)`` that belong to it; None if none does."""
        assert self.size is not None
        first, end = self.span
        if end <= start or stop <= first:
            return None
        remainder = torch.arange(start - self.offset, stop - self.offset)
        inside = remainder >= 0
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda dim: -dim[1]):
            index = remainder.div(stride, rounding_mode="floor")
            inside &= index < size
            remainder -= index * stride
        return inside & (remainder == 0)


class Step(NamedTuple):
    """An in-place operation on each element of ``view`` independently.

    ``kind`` is ``random``, ``constant``, ``elementwise``, or ``value``: the values are the flat tensor
    ``arguments[0]``.
    """

    kind: str
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    view: Region


class ComputedStep(NamedTuple):
    """A computation that is not elementwise, such as an orthogonal initialization.

    ``sources`` are the names of the tensors and the numbers of the random draws that it uses.
    """

    sources: frozenset[str | int]


@dataclass
class TensorRecord:
    """The steps that initialize one tensor, since it was last overwritten."""

    dtype: torch.dtype
    numel: int
    steps: list[Step | ComputedStep] = field(default_factory=list)

    @property
    def initialized(self) -> bool:
        """Whether every element gets a value. For computed tensors this is checked when they are computed."""
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
        """Whether the steps require the whole tensor."""
        return any(isinstance(step, ComputedStep) for step in self.steps)

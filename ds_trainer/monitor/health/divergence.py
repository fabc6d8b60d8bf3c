"""Divergence: how many steps may be skipped, and which loss is a spike. Pure arithmetic.

All inputs are equal on all ranks, so all results are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


class TrainingDiverged(RuntimeError):
    """Raised on all ranks: the loss or gradient is not finite or the loss is a spike, and the training stops."""


class SkippedSteps:
    """Counts skipped steps.

    Args:
        limit: largest number of skips and rollbacks in ``window`` steps.
        window: a number of steps.

    Attributes:
        tried: steps so far, including skipped ones and those undone by a rollback; never decreases.
        skipped: number of skipped steps.
        rollbacks: number of rollbacks.
    """

    def __init__(self, limit: int, window: int) -> None:
        self.limit = limit
        self.window = window
        self.tried, self.skipped, self.rollbacks = 0, 0, 0
        self._at: list[int] = []

    def record(self) -> int:
        """Count the current step as skipped or rolled back. Returns the number of such steps in the window."""
        self._at = [tried for tried in self._at if tried > self.tried - self.window]
        self._at.append(self.tried)
        return len(self._at)

    @property
    def limit_exceeded(self) -> bool:
        """Whether more steps of the window were skipped or rolled back than allowed."""
        return len(self._at) > self.limit

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"tried": self.tried, "skipped": self.skipped, "rollbacks": self.rollbacks, "at": list(self._at)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`to_json` returned."""
        self.tried, self.skipped, self.rollbacks = state["tried"], state["skipped"], state["rollbacks"]
        self._at = list(state["at"])


class SpikeDetector:
    """Finds losses that are much larger than the previous ones.

    A loss is a spike if it exceeds the median of the last steps by more than ``factor - 1`` times the absolute value of
    the median: above ``factor x median`` for a positive loss. A single outlier hardly changes the median; spikes are
    not included in it.

    Args:
        factor: above 1.
        window: steps in the median. No loss is a spike before a quarter of them (at least 5) have been seen.
    """

    def __init__(self, factor: float, window: int) -> None:
        self.factor = factor
        self.needed = min(window, max(5, math.ceil(window / 4)))
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def median(self) -> float:
        """The median loss of the window; NaN if there are too few."""
        return statistics.median(self._losses) if len(self._losses) >= self.needed else math.nan

    def is_spike(self, loss: float) -> bool:
        """Whether ``loss`` is a spike. A non-finite loss is not: it is handled separately."""
        median = self.median
        return math.isfinite(loss) and loss - median > (self.factor - 1) * abs(median)

    def add(self, loss: float) -> None:
        """Add the loss of a step that was trained on."""
        self._losses.append(loss)

    def to_json(self) -> list[float]:
        """The losses of the window."""
        return list(self._losses)

    def restore(self, losses: Sequence[float]) -> None:
        """Restore what :meth:`to_json` returned, up to the size of the window."""
        self._losses.extend(losses)

"""When a training diverges: how many steps may be left out, and which loss is a spike. Arithmetic alone.

Everything here gets numbers that are the same on all ranks, and gives the same answers there.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


class TrainingDiverged(RuntimeError):
    """The training was ended because its loss or gradient is not finite, or its loss is a spike; on all ranks."""


class Incidents:
    """Steps that were left out, and how many more may be.

    Args:
        limit: of them, in ``window`` steps.
        window: steps that are looked back on.

    Attributes:
        tried: steps so far, with those that were left out and those that a rollback took back: counts on for ever.
        skipped: steps of them that were left out.
        rollbacks: how often the run went back.
    """

    def __init__(self, limit: int, window: int) -> None:
        self.limit = limit
        self.window = window
        self.tried, self.skipped, self.rollbacks = 0, 0, 0
        self._at: list[int] = []

    def note(self) -> int:
        """The step that is being tried is one to be left out; the number of those in the window, with it."""
        self._at = [tried for tried in self._at if tried > self.tried - self.window]
        self._at.append(self.tried)
        return len(self._at)

    @property
    def too_many(self) -> bool:
        """Whether the last one was one too many."""
        return len(self._at) > self.limit

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"tried": self.tried, "skipped": self.skipped, "rollbacks": self.rollbacks, "at": list(self._at)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Put back what :meth:`to_json` gave."""
        self.tried, self.skipped, self.rollbacks = kept["tried"], kept["skipped"], kept["rollbacks"]
        self._at = list(kept["at"])


class SpikeDetector:
    """Finds losses that stand out from those before.

    A loss is a spike where it exceeds the median of the last steps by more than ``factor - 1`` times the median's
    size: above ``factor x median`` for a loss that is positive, as most are. The median does not follow a single
    outlier; those that were found are not taken into it.

    Args:
        factor: above 1.
        window: steps of the median. Nothing is a spike before a quarter of them (at least 5) have been seen.
    """

    def __init__(self, factor: float, window: int) -> None:
        self.factor = factor
        self.needed = min(window, max(5, math.ceil(window / 4)))
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def median(self) -> float:
        """Of the losses in the window; NaN where there are too few."""
        return statistics.median(self._losses) if len(self._losses) >= self.needed else math.nan

    def is_spike(self, loss: float) -> bool:
        """Whether ``loss`` stands out. One that is not finite does not: it is another matter."""
        median = self.median
        return math.isfinite(loss) and loss - median > (self.factor - 1) * abs(median)

    def add(self, loss: float) -> None:
        """A step of this loss was trained on."""
        self._losses.append(loss)

    def to_json(self) -> list[float]:
        """The losses of the window."""
        return list(self._losses)

    def restore(self, losses: Sequence[float]) -> None:
        """Put back what :meth:`to_json` gave, as far as the window reaches."""
        self._losses.extend(losses)

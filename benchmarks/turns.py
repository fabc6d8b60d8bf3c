"""Lets several training loops in one process take turns, and times their steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


class Turns:
    """Lets several threads run one at a time, in a fixed order, and times their steps.

    Args:
        schedule: whose turn it is and how many steps it has. A turn of 0 steps lasts until :meth:`leave`.
        align: called when a turn begins, before the clock starts (a barrier, where there are several ranks).
    """

    def __init__(self, schedule: Sequence[tuple[str, int]], align: Callable[[], None] = lambda: None) -> None:
        self.times: list[tuple[str, list[float]]] = []
        self._schedule = list(schedule)
        self._align = align
        self._turn = 0
        self._changed = threading.Condition()
        self._steps: list[float] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        """Wait for the next turn of ``name``."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn < len(self._schedule) and self._schedule[self._turn][0] == name)
        self._align()
        self._since = time.perf_counter()

    def step_done(self, name: str) -> None:
        """A step of the loop whose turn it is has ended; after the last one of the turn, wait for the next turn."""
        now = time.perf_counter()
        self._steps.append(now - self._since)
        self._since = now
        if len(self._steps) == self._schedule[self._turn][1]:
            self.times.append((name, self._steps))
            self._steps = []
            self.leave()
            self.enter(name)

    def leave(self) -> None:
        """Hand over to the next in the schedule."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

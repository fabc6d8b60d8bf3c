"""Lets several training loops in one process take turns, and times their steps."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Moment(NamedTuple):
    """Two clocks, in seconds; also the time between two moments.

    ``wall`` is wall-clock time. ``cpu`` is the CPU time of this process with all its threads: other load on the machine
    hardly affects it, but it does not include waiting for other ranks.
    """

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        """Both clocks."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Moment) -> Moment:
        """The time from ``start`` to this moment."""
        return Moment(self.wall - start.wall, self.cpu - start.cpu)


class Turns:
    """Lets several threads run one at a time, in a fixed order, and times their steps.

    Args:
        schedule: name and number of steps of each turn. A turn of 0 steps lasts until :meth:`leave`.
        align: called when a turn begins, before the clock starts (a barrier if there are several ranks).
    """

    def __init__(self, schedule: Sequence[tuple[str, int]], align: Callable[[], None] = lambda: None) -> None:
        self.times: list[tuple[str, list[Moment]]] = []
        self._schedule = list(schedule)
        self._align = align
        self._turn = 0
        self._changed = threading.Condition()
        self._steps: list[Moment] = []
        self._since = Moment(0.0, 0.0)

    def enter(self, name: str) -> None:
        """Wait for the next turn of ``name``."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn < len(self._schedule) and self._schedule[self._turn][0] == name)
        self._align()
        self._since = Moment.now()

    def step_done(self, name: str) -> None:
        """Record the end of a step. After the last step of the turn, wait for the next turn."""
        now = Moment.now()
        self._steps.append(now.since(self._since))
        self._since = now
        if len(self._steps) == self._schedule[self._turn][1]:
            self.times.append((name, self._steps))
            self._steps = []
            self.leave()
            self.enter(name)

    def run(self, name: str, loop: Callable[[], object]) -> None:
        """Run ``loop`` in the turns of ``name``, as the target of a thread. The process ends if it fails."""
        self.enter(name)
        try:
            loop()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other loops and ranks would wait forever
        self.leave()

    def leave(self) -> None:
        """Begin the next turn of the schedule."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

"""``Heartbeat``: how far this rank is, in plain attributes that other threads may read at any time.

The training thread writes them: a few assignments a step, no lock. Whether that is too long ago is arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REMEMBERED = 50  # durations of steps that the median is taken of

START, DATA, COMPUTE, UPDATE, BETWEEN = "start", "data loading", "forward and backward", "update", "between steps"


class Heartbeat:
    """Step, phase, and the moment of the last progress of one rank.

    Args:
        step: optimizer steps that were done before.
        clock: seconds that never go backwards. That of Linux stands still while the machine sleeps.

    Attributes:
        step: optimizer steps done.
        phase: what the rank is doing.
        phase_since, progress_at: moments of ``clock``.
        patient: whether the rank does something that may take long: its first step, an evaluation, a save.
    """

    def __init__(self, step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step = step
        self.phase = START
        self.phase_since = self.progress_at = self._step_began = clock()
        self.patient = True
        self._aside = 0.0  # seconds of the step under way that belong to something else
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)

    def enter(self, phase: str) -> None:
        """The rank begins something else."""
        self.phase, self.phase_since = phase, self._clock()

    def beat(self) -> None:
        """Something that takes long gets on."""
        self.progress_at = self._clock()

    def step_done(self, step: int) -> float:
        """An optimizer step has ended; the seconds since the one before, without those of :meth:`aside`."""
        now = self._clock()
        seconds = now - self._step_began - self._aside
        if not self.patient:  # a first step is no measure: kernels are compiled, caches filled
            self._durations.append(seconds)
        self._step_began, self._aside = now, 0.0
        self.step, self.progress_at, self.patient = step, now, False
        self.phase, self.phase_since = BETWEEN, now
        return seconds

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """Something besides the steps, which may take long. May be nested; the innermost name is shown."""
        before, patient, began = self.phase, self.patient, self._clock()
        self.patient = True
        self.enter(phase)
        try:
            yield
        finally:
            now = self._clock()
            self.patient, self.progress_at = patient, now
            if before in _STEPS:
                self._aside += now - began
            self.phase, self.phase_since = before, now

    def forgive(self) -> None:
        """The whole process stood still (stopped, or its machine slept): what it did before counts from now."""
        self.progress_at = self._clock()

    def median(self) -> float | None:
        """Median seconds of a step; None before the second one."""
        durations = list(self._durations)
        return statistics.median(durations) if durations else None

    def stalled(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self.progress_at

    def standing(self) -> float:
        """Seconds in this phase."""
        return self._clock() - self.phase_since


_STEPS = (START, DATA, COMPUTE, UPDATE, BETWEEN)


class Limit:
    """How long a rank may go without progress.

    Args:
        floor: seconds, at least.
        factor: times the median step.
        patience: seconds, at least, where something may take long (:attr:`Heartbeat.patient`).
    """

    def __init__(self, floor: float, factor: float, patience: float) -> None:
        self.floor, self.factor, self.patience = floor, factor, patience

    def of_step(self, heartbeat: Heartbeat) -> float:
        """Seconds that a step may take."""
        return max(self.floor, self.factor * (heartbeat.median() or 0.0))

    def of(self, heartbeat: Heartbeat) -> float:
        """Seconds that the rank may go without progress in what it does now."""
        step = self.of_step(heartbeat)
        return max(step, self.patience) if heartbeat.patient else step

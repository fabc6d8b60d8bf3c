"""``Heartbeat``: the progress of this rank, in plain attributes that other threads may read at any time.

The training thread writes them: a few assignments per step, no lock.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REMEMBERED = 50  # step durations in the median

START, DATA, COMPUTE, UPDATE, BETWEEN = "start", "data loading", "forward and backward", "update", "between steps"


class Heartbeat:
    """Step, phase, and time of the last progress of one rank.

    Args:
        step: optimizer steps done before.
        clock: monotonic seconds. Linux's monotonic clock stands still while the machine sleeps.

    Attributes:
        step: optimizer steps done.
        phase: what the rank is doing.
        phase_since, progress_at: readings of ``clock``.
        patient: whether this phase may take long: the first step, an evaluation, a save.
    """

    def __init__(self, step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step = step
        self.phase = START
        self.phase_since = self.progress_at = self._step_began = clock()
        self.patient = True
        self._paused_seconds = 0.0  # seconds of the current step that belong to something else
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)

    def enter(self, phase: str) -> None:
        """Begin another phase."""
        self.phase, self.phase_since = phase, self._clock()

    def beat(self) -> None:
        """Record progress within a long phase."""
        self.progress_at = self._clock()

    def step_done(self, step: int) -> float:
        """End an optimizer step. Returns its seconds since the previous one, without those of :meth:`paused`."""
        now = self._clock()
        seconds = now - self._step_began - self._paused_seconds
        if not self.patient:  # the first step is not typical: kernels are compiled, caches filled
            self._durations.append(seconds)
        self._step_began, self._paused_seconds = now, 0.0
        self.step, self.progress_at, self.patient = step, now, False
        self.phase, self.phase_since = BETWEEN, now
        return seconds

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """A phase outside the steps, which may take long. Can be nested; the innermost name is shown."""
        before, patient, began = self.phase, self.patient, self._clock()
        self.patient = True
        self.enter(phase)
        try:
            yield
        finally:
            now = self._clock()
            self.patient, self.progress_at = patient, now
            if before in _STEPS:
                self._paused_seconds += now - began
            self.phase, self.phase_since = before, now

    def restart_clock(self) -> None:
        """Restart the time since the last progress: the whole process was stopped, or its machine slept."""
        self.progress_at = self._clock()

    def median(self) -> float | None:
        """Median seconds of a step; None before the second step."""
        durations = list(self._durations)
        return statistics.median(durations) if durations else None

    def seconds_since_progress(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self.progress_at

    def seconds_in_phase(self) -> float:
        """Seconds in this phase."""
        return self._clock() - self.phase_since


_STEPS = (START, DATA, COMPUTE, UPDATE, BETWEEN)


class Limit:
    """The longest time that a rank may take without progress.

    Args:
        floor: lower bound in seconds.
        factor: lower bound in median steps.
        patience: lower bound in seconds for phases that may take long (:attr:`Heartbeat.patient`).
    """

    def __init__(self, floor: float, factor: float, patience: float) -> None:
        self.floor, self.factor, self.patience = floor, factor, patience

    def of_step(self, heartbeat: Heartbeat) -> float:
        """Seconds that a step may take."""
        return max(self.floor, self.factor * (heartbeat.median() or 0.0))

    def of(self, heartbeat: Heartbeat) -> float:
        """Seconds that the rank may take without progress in its current phase."""
        step = self.of_step(heartbeat)
        return max(step, self.patience) if heartbeat.patient else step

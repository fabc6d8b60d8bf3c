"""``PhaseClock``: what the training thread spends its time on, in seconds by phase.

Changing the phase reads the host's clock and nothing else: no wait for the device. On a GPU the host runs ahead, so a
phase has the time in which the host launches its work, and the wait for the device counts where the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START = "start of the training"
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
COMMUNICATION = "communication"
BETWEEN = "between steps"
CHECKS = "checks of the first batch"

_OF_STEPS = (DATA, FORWARD, BACKWARD, OPTIMIZER, BETWEEN)


class PhaseClock:
    """Seconds by phase since it was created.

    Args:
        waited: seconds that this thread has waited for other ranks so far. Within a step they count as communication
            instead of the phase.
        clock: monotonic seconds.
    """

    def __init__(self, waited: Callable[[], float] = lambda: 0.0, clock: Callable[[], float] = time.perf_counter):
        self._waited, self._clock = waited, clock
        self._seconds: dict[str, float] = {}
        self._phase = START
        self._since, self._waited_before = clock(), waited()

    def enter(self, phase: str) -> str:
        """Begin another phase. Returns the one that ends."""
        before, now, waited = self._phase, self._clock(), self._waited()
        seconds, communication = now - self._since, waited - self._waited_before
        if communication and before in _OF_STEPS:
            self._seconds[COMMUNICATION] = self._seconds.get(COMMUNICATION, 0.0) + communication
            seconds -= communication
        self._seconds[before] = self._seconds.get(before, 0.0) + seconds
        self._phase, self._since, self._waited_before = phase, now, waited
        return before

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Context of another phase; the one before continues after it."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def backward(self) -> _Backward:
        """Context of a backward pass."""
        return _Backward(self)

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase so far, with the current one."""
        self.enter(self._phase)
        return dict(self._seconds)


class _Backward:
    """:meth:`PhaseClock.inside` without a generator: it is entered for every micro-batch."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._before = BETWEEN

    def __enter__(self) -> None:
        self._before = self._clock.enter(BACKWARD)

    def __exit__(self, *error: object) -> None:
        self._clock.enter(self._before)

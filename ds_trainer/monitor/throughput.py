"""How fast the run is: tokens, samples and optimizer steps a second. Pure arithmetic, no device, no process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Speed over one stretch of time. All rates are 0.0 where no time has passed."""

    seconds: float
    tokens_per_second: float
    samples_per_second: float
    steps_per_second: float


@dataclass(frozen=True)
class _Mark:
    """What had been counted at one moment."""

    seconds: float
    tokens: int
    samples: int
    steps: int


class ThroughputMeter:
    """Counts work and divides it by the time it took.

    The caller decides whose work it is: hand in the tokens of the global batch to get the speed of the whole job, of
    one rank's batch to get that rank's. Time inside :meth:`paused` (evaluation, saving) does not count, so that the
    figures stay those of training.

    ``clock`` returns seconds and never goes backwards; tests hand in their own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens = 0
        self._samples = 0
        self._steps = 0
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._began = clock()
        self._start = _Mark(0.0, 0, 0, 0)
        self._last_read = self._start

    def add(self, tokens: int, samples: int, steps: int = 1) -> None:
        """Count finished work: ``tokens`` and ``samples`` of ``steps`` optimizer steps."""
        self._tokens += tokens
        self._samples += samples
        self._steps += steps

    def read(self) -> Rates:
        """Rates since the last call of this method (the first time: since the meter was made)."""
        now = self._now()
        rates = _rates(self._last_read, now)
        self._last_read = now
        return rates

    def overall(self) -> Rates:
        """Rates since the meter was made. Leaves the window of :meth:`read` alone."""
        return _rates(self._start, self._now())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in this block counts for nothing. Blocks may be nested; the outermost one counts."""
        if self._paused_at is not None:
            yield
            return
        self._paused_at = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - self._paused_at
            self._paused_at = None

    def _now(self) -> _Mark:
        moment = self._clock() if self._paused_at is None else self._paused_at
        return _Mark(moment - self._began - self._paused_seconds, self._tokens, self._samples, self._steps)


def _rates(start: _Mark, end: _Mark) -> Rates:
    seconds = end.seconds - start.seconds
    if seconds <= 0.0:
        return Rates(0.0, 0.0, 0.0, 0.0)
    return Rates(
        seconds=seconds,
        tokens_per_second=(end.tokens - start.tokens) / seconds,
        samples_per_second=(end.samples - start.samples) / seconds,
        steps_per_second=(end.steps - start.steps) / seconds,
    )

"""How fast the run is: tokens, samples, steps and operations a second. Pure arithmetic, no device, no process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Speed over one stretch of time. All rates are 0.0 where no time has passed."""

    seconds: float
    tokens_per_second: float
    samples_per_second: float
    steps_per_second: float
    flops_per_second: float = 0.0
    """Floating-point operations of the model a second (:mod:`ds_trainer.planner.flops`)."""
    data_wait: float = 0.0
    """Part of the time, 0 to 1, in which the loop waited for data."""


@dataclass(frozen=True)
class _Mark:
    """What had been counted at one moment."""

    seconds: float = 0.0
    tokens: int = 0
    samples: int = 0
    steps: int = 0
    flops: float = 0.0
    waited: float = 0.0


class ThroughputMeter:
    """Counts work and divides it by the time it took.

    The caller decides whose work it is: hand in the tokens of the global batch to get the speed of the whole job, of
    one rank's batch to get that rank's. Time inside :meth:`paused` (evaluation, saving) does not count, so that the
    figures stay those of training.

    ``clock`` returns seconds and never goes backwards; tests hand in their own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._done = _Mark()
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._began = clock()
        self._last_read = _Mark()

    def add(
        self, tokens: int = 0, samples: int = 0, steps: int = 1, *, flops: float = 0.0, waited: float = 0.0
    ) -> None:
        """Count finished work of ``steps`` optimizer steps, of which ``waited`` seconds went by without data."""
        done = self._done
        self._done = _Mark(
            0.0,
            done.tokens + tokens,
            done.samples + samples,
            done.steps + steps,
            done.flops + flops,
            done.waited + waited,
        )

    def read(self) -> Rates:
        """Rates since the last call of this method (the first time: since the meter was made)."""
        now = self._now()
        rates = _rates(self._last_read, now)
        self._last_read = now
        return rates

    def overall(self) -> Rates:
        """Rates since the meter was made. Leaves the window of :meth:`read` alone."""
        return _rates(_Mark(), self._now())

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
        return replace(self._done, seconds=moment - self._began - self._paused_seconds)


class TimedIterator(Generic[T]):
    """An iterator that notes how long its caller waited for it: ``seconds``, on the host's clock."""

    def __init__(self, source: Iterable[T], clock: Callable[[], float] = time.perf_counter) -> None:
        self._source = iter(source)
        self._clock = clock
        self.seconds = 0.0

    def __iter__(self) -> TimedIterator[T]:
        return self

    def __next__(self) -> T:
        start = self._clock()
        try:
            return next(self._source)
        finally:
            self.seconds += self._clock() - start


def _rates(start: _Mark, end: _Mark) -> Rates:
    seconds = end.seconds - start.seconds
    if seconds <= 0.0:
        return Rates(0.0, 0.0, 0.0, 0.0)
    return Rates(
        seconds=seconds,
        tokens_per_second=(end.tokens - start.tokens) / seconds,
        samples_per_second=(end.samples - start.samples) / seconds,
        steps_per_second=(end.steps - start.steps) / seconds,
        flops_per_second=(end.flops - start.flops) / seconds,
        data_wait=min(1.0, (end.waited - start.waited) / seconds),
    )

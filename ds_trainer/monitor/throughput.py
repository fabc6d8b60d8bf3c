"""Throughput: tokens, samples, steps and operations per second. Pure arithmetic; no device, no process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Throughput over one period. All rates are 0.0 if no time has passed."""

    seconds: float
    tokens_per_second: float
    samples_per_second: float
    steps_per_second: float
    flops_per_second: float = 0.0
    """Floating-point operations of the model per second (:mod:`ds_trainer.planner.flops`)."""
    data_wait: float = 0.0
    """Fraction of the time, 0 to 1, in which the loop waited for data."""


@dataclass(frozen=True)
class _Counts:
    """Totals at one moment."""

    seconds: float = 0.0
    tokens: int = 0
    samples: int = 0
    steps: int = 0
    flops: float = 0.0
    waited: float = 0.0


class ThroughputMeter:
    """Counts work and divides it by its time.

    The caller decides whose work it is: pass the tokens of the global batch for the throughput of the job, those of one
    rank's batch for that rank's. Time inside :meth:`paused` (evaluation, saving) does not count, so that the rates are
    those of training.

    ``clock`` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._done = _Counts()
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._began = clock()
        self._last_read = _Counts()

    def add(
        self, tokens: int = 0, samples: int = 0, steps: int = 1, *, flops: float = 0.0, waited: float = 0.0
    ) -> None:
        """Add the work of ``steps`` optimizer steps, in which the loop waited ``waited`` seconds for data."""
        done = self._done
        self._done = _Counts(
            0.0,
            done.tokens + tokens,
            done.samples + samples,
            done.steps + steps,
            done.flops + flops,
            done.waited + waited,
        )

    def read(self) -> Rates:
        """Rates since the last call of this method (the first time: since the meter was created)."""
        now = self._now()
        rates = _rates(self._last_read, now)
        self._last_read = now
        return rates

    def overall(self) -> Rates:
        """Rates since the meter was created. Does not change the period of :meth:`read`."""
        return _rates(_Counts(), self._now())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this block. Blocks can be nested."""
        if self._paused_at is not None:
            yield
            return
        self._paused_at = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - self._paused_at
            self._paused_at = None

    def _now(self) -> _Counts:
        moment = self._clock() if self._paused_at is None else self._paused_at
        return replace(self._done, seconds=moment - self._began - self._paused_seconds)


class TimedIterator(Generic[T]):
    """An iterator that measures how long its caller waits for it: ``seconds``, on the host's clock."""

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


def _rates(start: _Counts, end: _Counts) -> Rates:
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

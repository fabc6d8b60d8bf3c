"""Throughput: tokens, samples, steps and operations per second; and the phases that the time goes to.

Pure arithmetic; no device, no process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")

START = "start of the training"
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
COMMUNICATION = "communication"
BETWEEN = "between steps"
CHECKS = "checks of the first batch"

_OF_STEPS = (DATA, FORWARD, BACKWARD, OPTIMIZER, BETWEEN)


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


@dataclass
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
        done.tokens += tokens
        done.samples += samples
        done.steps += steps
        done.flops += flops
        done.waited += waited

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
    """An iterator that measures how long its caller waits for it: ``seconds``, on the host's clock.

    ``waited`` are those of them in which this thread waited for other ranks, by the second clock.
    """

    def __init__(
        self,
        source: Iterable[T],
        clock: Callable[[], float] = time.perf_counter,
        waits: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._source = iter(source)
        self._clock, self._waits = clock, waits
        self.seconds = self.waited = 0.0

    def __iter__(self) -> TimedIterator[T]:
        return self

    def __next__(self) -> T:
        start, waited = self._clock(), self._waits()
        try:
            return next(self._source)
        finally:
            self.seconds += self._clock() - start
            self.waited += self._waits() - waited


class PhaseClock:
    """What the training thread spends its time on: seconds by phase, since it was created.

    Changing the phase reads the host's clock and nothing else: no wait for the device. On a GPU the host runs ahead, so
    a phase has the time in which the host launches its work, and the wait for the device counts where the host waits.

    Args:
        waited: seconds that this thread has waited for other ranks so far. Within a step they count as communication
            instead of the phase.
        clock: monotonic seconds.

    Attributes:
        backward: context of a backward pass, which can be entered again and again.
    """

    def __init__(self, waited: Callable[[], float] = lambda: 0.0, clock: Callable[[], float] = time.perf_counter):
        self._waited, self._clock = waited, clock
        self._seconds: dict[str, float] = {}
        self._phase = START
        self._since, self._waited_before = clock(), waited()
        self.backward = _Backward(self)

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

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase so far, with the current one."""
        self.enter(self._phase)
        return dict(self._seconds)


class _Backward:
    """:meth:`PhaseClock.inside` as one object, without a generator: it is entered for every micro-batch."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._before = BETWEEN

    def __enter__(self) -> None:
        self._before = self._clock.enter(BACKWARD)

    def __exit__(self, *error: object) -> None:
        self._clock.enter(self._before)


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

"""``RunHealth``: receives the phases of the training loop, and runs the watchdog and the straggler report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ds_trainer.monitor import throughput
from ds_trainer.monitor.health.heartbeat import BETWEEN, COMPUTE, DATA, UPDATE, Heartbeat, Limit
from ds_trainer.monitor.health.status_board import StatusBoard
from ds_trainer.monitor.health.stragglers import StepTimes, StragglerReport
from ds_trainer.monitor.health.waits import WaitClock
from ds_trainer.monitor.health.watchdog import Watchdog, WatchdogRules
from ds_trainer.monitor.throughput import PhaseClock, TimedIterator
from ds_trainer.utils import distributed
from ds_trainer.utils.outcomes import host_name

T = TypeVar("T")

_PHASES = {DATA: throughput.DATA, COMPUTE: throughput.FORWARD, UPDATE: throughput.OPTIMIZER}
FOLDER = "health"
STRAGGLERS = "stragglers.jsonl"


@dataclass(frozen=True)
class HealthSettings:
    """Limits of the watchdog, and interval of the straggler report.

    Attributes:
        hang_seconds, hang_factor: a hang is no progress for this many seconds and this many median steps; 0 seconds: no
            watchdog.
        patience: limit in seconds for phases that may take long: the first step, an evaluation, a save.
        abort: whether a hang ends the job; None: on several machines.
        straggler_steps: steps between reports on slow ranks; 0: none.
    """

    hang_seconds: float
    hang_factor: float
    patience: float
    abort: bool | None
    straggler_steps: int


class RunHealth:
    """The health monitoring of one training: a context manager that all ranks enter together.

    Args:
        watch: limits and intervals.
        directory: output directory of the run; reports go to a folder in it.
        step: optimizer steps done before.
        on_abort: called in a thread before a hung job is ended.

    Attributes:
        clock: seconds of the training thread by phase.
        seconds_ahead: seconds of :meth:`reading_ahead` for this step.
    """

    def __init__(self, watch: HealthSettings, directory: Path, step: int, on_abort: Callable[[], None]) -> None:
        self._watch, self._directory, self._on_abort = watch, directory / FOLDER, on_abort
        self._heartbeat, self._waits = Heartbeat(step), WaitClock()
        self.clock = PhaseClock(lambda: self._waits.seconds)
        self._times = StepTimes(watch.straggler_steps, host_name()) if watch.straggler_steps else None
        self._report: StragglerReport | None = None
        self._watchdog: Watchdog | None = None
        self._waited = self._waited_paused = self._waited_ahead = 0.0
        self.seconds_ahead = 0.0
        self._data: TimedIterator[Any] | None = None
        self._pauses = 0
        self.on_phase: Callable[[str], None] | None = None
        """Called with the name of each phase of a step as it begins: data, compute, update."""

    def __enter__(self) -> RunHealth:
        watch = self._watch
        several = distributed.world_size() > 1
        if not watch.hang_seconds and not (watch.straggler_steps and several):
            return self
        board = StatusBoard()
        if self._times is not None and several:
            self._report = StragglerReport(self._times, self._directory / STRAGGLERS)
        limit = Limit(watch.hang_seconds or math.inf, watch.hang_factor, watch.patience)
        abort = not distributed.alike(host_name()) if watch.abort is None else watch.abort
        self._watchdog = Watchdog(
            WatchdogRules.of(limit, abort, self._on_abort, board.world_size),
            self._heartbeat,
            self._waits,
            self._directory,
            board,
            self._report,
        )
        self._waits.start()
        self._watchdog.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._waits.stop()

    # -- called by the loop -----------------------------------------------------------------------------------------

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Before a step: its batches are read to know how many there are (a stream). Counts as its data loading."""
        began, waited = time.perf_counter(), self._waits.seconds
        self._heartbeat.enter(DATA)
        with self.clock.inside(throughput.DATA):
            yield
        self._heartbeat.enter(BETWEEN)
        self.seconds_ahead, self._waited_ahead = time.perf_counter() - began, self._waits.seconds - waited

    def begin_data(self, iterator: Iterator[T]) -> TimedIterator[T]:
        """Begin a step and its data loading. Returns the iterator to read from."""
        self._enter(DATA)
        # If one rank reads for several, the others wait for it in a collective: their own data is not slow.
        timed = TimedIterator(iterator, waits=lambda: self._waits.seconds)
        self._data = timed
        return timed

    def begin_compute(self) -> None:
        """The data is loaded; forward and backward passes begin."""
        self._enter(COMPUTE)

    def begin_update(self) -> None:
        """All gradients are computed; the update begins."""
        self._enter(UPDATE)

    def _enter(self, phase: str) -> None:
        self._heartbeat.enter(phase)
        self.clock.enter(_PHASES[phase])
        if self.on_phase is not None:
            self.on_phase(phase)

    def step_done(self, step: int, data_seconds: float) -> None:
        """End optimizer step number ``step``; the loop waited ``data_seconds`` of it for data."""
        first = self._heartbeat.patient
        seconds = self._heartbeat.step_done(step)
        self.clock.enter(throughput.BETWEEN)
        waited = self._waits.seconds
        communication, self._waited = waited - self._waited - self._waited_paused, waited
        self._waited_paused = 0.0
        if self._times is not None and not first:
            in_data = self._waited_ahead + (0.0 if self._data is None else self._data.waited)
            self._times.add(step, seconds, max(0.0, data_seconds - in_data), communication)
        self.seconds_ahead = self._waited_ahead = 0.0
        # Nobody but the loop may hold the iterator: data loader workers end with the last reference to it. If it were
        # found by the garbage collector instead, torch would wait 5 seconds for each worker.
        self._data = None

    def median_step_seconds(self) -> float | None:
        """Median seconds of a step, without evaluations and saves; None before the second step."""
        return self._heartbeat.median()

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """A phase outside the steps, which may take long: it counts neither as a hang nor as part of a step."""
        waited, outermost = self._waits.seconds, self._pauses == 0
        self._pauses += 1
        try:
            with self._heartbeat.paused(what), self.clock.inside(what):
                yield
        finally:
            self._pauses -= 1
            if outermost:
                self._waited_paused += self._waits.seconds - waited

    def beat(self) -> None:
        """Record progress within a long phase: a batch of an evaluation is done."""
        self._heartbeat.beat()

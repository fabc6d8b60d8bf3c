"""``RunHealth``: what the training loop tells about its steps, and what watches over them."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ds_trainer.monitor.health.board import Board
from ds_trainer.monitor.health.heartbeat import COMPUTE, DATA, UPDATE, Heartbeat, Limit
from ds_trainer.monitor.health.stragglers import StepTimes, StragglerReport
from ds_trainer.monitor.health.waits import WaitClock
from ds_trainer.monitor.health.watchdog import Rules, Watchdog
from ds_trainer.monitor.throughput import TimedIterator
from ds_trainer.utils import distributed

T = TypeVar("T")

FOLDER = "health"
STRAGGLERS = "stragglers.jsonl"


@dataclass(frozen=True)
class Watch:
    """What is watched.

    Attributes:
        hang_seconds, hang_factor: a hang is no progress for so many seconds and for so many median steps; 0 seconds:
            never.
        patience: seconds for what may take long: the first step, an evaluation, a save.
        abort: a hang ends the job.
        straggler_steps: steps between reports on slow ranks; 0: none.
    """

    hang_seconds: float
    hang_factor: float
    patience: float
    abort: bool
    straggler_steps: int


class RunHealth:
    """One training: a context in which the loop tells its phases. To be entered by all ranks together.

    Args:
        watch: what is watched.
        directory: output directory of the run; reports go to a folder in it.
        step: optimizer steps that were done before.
        last_wish: called in a thread before a hung job is ended.
    """

    def __init__(self, watch: Watch, directory: Path, step: int, last_wish: Callable[[], None]) -> None:
        self._watch, self._directory, self._last_wish = watch, directory / FOLDER, last_wish
        self._heartbeat, self._waits = Heartbeat(step), WaitClock()
        self._times = StepTimes(watch.straggler_steps, socket.gethostname()) if watch.straggler_steps else None
        self._report: StragglerReport | None = None
        self._watchdog: Watchdog | None = None
        self._waited = self._waited_aside = 0.0
        self._data: TimedIterator[Any] | None = None
        self._asides = 0

    def __enter__(self) -> RunHealth:
        watch = self._watch
        several = distributed.world_size() > 1
        if not watch.hang_seconds and not (watch.straggler_steps and several):
            return self
        board = Board()
        if self._times is not None and several:
            self._report = StragglerReport(self._times, self._directory / STRAGGLERS)
        limit = Limit(watch.hang_seconds or math.inf, watch.hang_factor, watch.patience)
        self._watchdog = Watchdog(
            Rules.of(limit, watch.abort, self._last_wish),
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

    def loads_data(self, iterator: Iterator[T]) -> Iterator[T]:
        """A step begins, its data is fetched: from what this returns."""
        self._heartbeat.enter(DATA)
        # Where one rank reads for several, the others wait for it in a collective: that is no slow data of theirs.
        self._data = TimedIterator(iterator, lambda: self._waits.seconds)
        return self._data

    def computes(self) -> None:
        """The data is there."""
        self._heartbeat.enter(COMPUTE)

    def updates(self) -> None:
        """All gradients are there."""
        self._heartbeat.enter(UPDATE)

    def step_done(self, step: int, data_seconds: float) -> None:
        """Optimizer step number ``step`` has ended; ``data_seconds`` of it went by without data."""
        first = self._heartbeat.patient
        seconds = self._heartbeat.step_done(step)
        waited = self._waits.seconds
        communication, self._waited = waited - self._waited - self._waited_aside, waited
        self._waited_aside = 0.0
        if self._times is not None and not first:
            in_data = 0.0 if self._data is None else self._data.seconds
            self._times.add(step, seconds, max(0.0, data_seconds - in_data), communication)

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Something besides the steps, which may take long: it counts neither as a hang nor as a slow step."""
        waited, outermost = self._waits.seconds, self._asides == 0
        self._asides += 1
        try:
            with self._heartbeat.aside(what):
                yield
        finally:
            self._asides -= 1
            if outermost:
                self._waited_aside += self._waits.seconds - waited

    def beat(self) -> None:
        """What takes long gets on: a batch of an evaluation is done."""
        self._heartbeat.beat()

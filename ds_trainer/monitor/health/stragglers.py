"""Which rank holds the others up, although all get on: every rank's time of a step, cut into three.

A step takes all ranks equally long, since they wait for each other; what differs is what they do with it::

    step = waiting for data + waiting for other ranks + own work

The slow rank is the one that waits least for others. Whether its data or its work is slow, the other two say.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.monitor.health.board import Board
from ds_trainer.monitor.records import MetricsWriter
from ds_trainer.utils.logging import get_logger

logger = get_logger("monitor.health")

NOTABLE = 0.1  # of a step: what one rank must be slower than the others to be named
DATA, WORK = "data loading", "its own work"
SECONDS_BETWEEN_WORDS = 30.0
"""Between two warnings in the log; the file has every window."""
MOST_RANKS = 16
"""Ranks of which a record holds all numbers: those that wait least for others. All of them have their quantiles."""
_QUANTILES = (0.0, 0.5, 0.9, 1.0)
_PENDING = 4  # windows that may wait for slow threads of other ranks


@dataclass(frozen=True)
class Window:
    """Mean seconds of a step of one rank, over some steps.

    Attributes:
        step: whole.
        data: waiting for data.
        communication: waiting for other ranks, in collectives; on GPUs only as far as the host waits.
        host: where the rank runs.
    """

    step: float
    data: float
    communication: float
    host: str = ""

    @property
    def work(self) -> float:
        """Own work: what is left."""
        return max(0.0, self.step - self.data - self.communication)

    @property
    def busy(self) -> float:
        """All but waiting for other ranks."""
        return max(0.0, self.step - self.communication)


@dataclass(frozen=True)
class Straggler:
    """The slowest rank.

    Attributes:
        rank: which one.
        busy, usual: its seconds a step without waiting for others, and the median of those of the other ranks.
        step: median seconds of a step.
        cause: ``DATA`` or ``WORK``, whichever makes more of the difference.
    """

    rank: int
    busy: float
    usual: float
    step: float
    cause: str

    @property
    def excess(self) -> float:
        """Seconds a step that the others wait for it."""
        return self.busy - self.usual

    @property
    def notable(self) -> bool:
        """Whether it is worth a word."""
        return self.excess > NOTABLE * self.step


def slowest(windows: list[Window]) -> Straggler | None:
    """The rank that the others wait for most; None where there is one rank."""
    if len(windows) < 2:
        return None
    rank = max(range(len(windows)), key=lambda index: windows[index].busy)
    others = [window for index, window in enumerate(windows) if index != rank]
    slow = windows[rank]
    late_data = slow.data - statistics.median(one.data for one in others)
    late_work = slow.work - statistics.median(one.work for one in others)
    return Straggler(
        rank,
        slow.busy,
        statistics.median(one.busy for one in others),
        statistics.median(one.step for one in windows),
        DATA if late_data > late_work else WORK,
    )


class StepTimes:
    """What one rank does with its steps; the training thread adds them up.

    Args:
        every: steps of a window; windows end at multiples of it, so those of all ranks fit together.
        host: where this rank runs.

    Attributes:
        finished: windows that nobody has taken yet: how many there were before (a rollback takes steps back, not
            windows), the last step, the window.
    """

    def __init__(self, every: int, host: str) -> None:
        self._every, self._host = every, host
        self._sums = [0.0, 0.0, 0.0]
        self._steps = self._windows = 0
        self.finished: deque[tuple[int, int, Window]] = deque(maxlen=_PENDING)

    def add(self, step: int, seconds: float, data: float, communication: float) -> None:
        """The optimizer step number ``step`` has ended."""
        sums = self._sums
        sums[0] += seconds
        sums[1] += data
        sums[2] += communication
        self._steps += 1
        if step % self._every == 0:
            step_seconds, data_seconds, waited = (value / self._steps for value in sums)
            self.finished.append((self._windows, step, Window(step_seconds, data_seconds, waited, self._host)))
            self._windows += 1
            self._sums, self._steps = [0.0, 0.0, 0.0], 0


class StragglerReport:
    """Brings the windows of all ranks together on the main process, at leisure: never in a step.

    Args:
        times: of this rank.
        path: where the main process writes a line for each window.
    """

    def __init__(self, times: StepTimes, path: Path) -> None:
        self._times = times
        self._writer = MetricsWriter(path)
        self._open: deque[tuple[int, int]] = deque(maxlen=_PENDING)
        self._told: deque[str] = deque()
        self._quiet_until = 0.0
        self._tell: Callable[[dict[str, Any]], None] = self._write

    def exchange(self, board: Board) -> None:
        """Hand over what has been finished since the last call; on the main process, report what is complete."""
        while self._times.finished:
            number, step, window = self._times.finished.popleft()
            board.put(key := _key(number, board.rank), [window.step, window.data, window.communication, window.host])
            self._told.append(key)
            self._open.append((number, step))
            if len(self._told) > 2 * _PENDING:
                board.drop(self._told.popleft())
        if board.rank != 0:
            return
        for number, step in list(self._open):
            found = board.get_all([_key(number, rank) for rank in range(board.world_size)])
            if found is None:
                break  # in order; the oldest is dropped when too many wait
            self._open.remove((number, step))
            self._report(step, [Window(*values) for values in found])

    def finish(self, board: Board, seconds: float = 1.0) -> None:
        """The training is over: the same once more; the main process waits a moment for the others' last window."""
        deadline = time.monotonic() + seconds
        self.exchange(board)
        while board.rank == 0 and self._open and time.monotonic() < deadline:
            time.sleep(0.02)
            self.exchange(board)
        self._writer.close()

    def _report(self, step: int, windows: list[Window]) -> None:
        slow = slowest(windows)
        busiest = sorted(range(len(windows)), key=lambda rank: windows[rank].busy, reverse=True)
        ranks = sorted(busiest[:MOST_RANKS])
        record: dict[str, Any] = {"step": step, "world_size": len(windows), "ranks": ranks}
        record["hosts"] = [windows[rank].host for rank in ranks]
        for name in ("step", "data", "communication", "work"):
            seconds = [round(getattr(one, name), 6) for one in windows]
            record[f"{name}_seconds"] = [seconds[rank] for rank in ranks]
            record[f"{name}_quantiles"] = quantiles(seconds)
        if slow is not None:
            record["slowest_rank"], record["slowest_excess"] = slow.rank, round(slow.excess, 6)
            record["slowest_cause"], record["notable"] = slow.cause, slow.notable
            if slow.notable and time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + SECONDS_BETWEEN_WORDS
                logger.warning("%s", said(step, slow, windows))
        self._tell(record)

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._writer.write(record)
        except OSError as error:
            logger.warning("%s cannot be written (%s); stragglers are only logged", self._writer.path, error)
            self._tell = lambda record: None


def quantiles(values: Sequence[float]) -> list[float]:
    """The least of ``values``, their median, what 90 % are not above, and the greatest."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in _QUANTILES]


def _key(window: int, rank: int) -> str:
    return f"windows/{window}/{rank}"


def said(step: int, slow: Straggler, windows: list[Window]) -> str:
    """The sentence for the log."""
    window = windows[slow.rank]
    return (
        f"Step {step}: slowest rank {slow.rank} ({window.host}): busy {slow.busy:.3f} s a step, "
        f"{slow.busy / max(slow.usual, 1e-9):.2f} times the others' {slow.usual:.3f} s; they wait {slow.excess:.3f} s "
        f"of {slow.step:.3f} s for it. It is {slow.cause}: {window.data:.3f} s for data, {window.work:.3f} s of work, "
        f"{window.communication:.3f} s for other ranks."
    )

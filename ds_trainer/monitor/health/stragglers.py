"""The rank that slows down the others: the step time of every rank, divided into three parts.

A step takes all ranks equally long, since they wait for each other. What differs is how they spend it::

    step = waiting for data + waiting for other ranks + work

The slow rank is the one that waits least for others. The other two parts say whether its data or its work is slow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.monitor.health.status_board import StatusBoard
from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.utils.logging import get_logger

logger = get_logger("monitor.health")

NOTABLE = 0.1  # of a step: a rank that is slower than the others by more is named
DATA, WORK = "data loading", "its own work"
SECONDS_BETWEEN_WARNINGS = 30.0
"""The log has at most one warning in this time; the file has every window."""
MOST_RANKS = 16
"""Number of ranks in a record: those that wait least for others. The quantiles are over all ranks."""
_QUANTILES = (0.0, 0.5, 0.9, 1.0)
_PENDING = 4  # incomplete windows that are kept


@dataclass(frozen=True)
class Window:
    """Mean seconds per step of one rank, over some steps.

    Attributes:
        step: the whole step.
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
        """The rest of the step: work."""
        return max(0.0, self.step - self.data - self.communication)

    @property
    def busy(self) -> float:
        """Everything except waiting for other ranks."""
        return max(0.0, self.step - self.communication)


@dataclass(frozen=True)
class Straggler:
    """The slowest rank.

    Attributes:
        rank: its number.
        busy, usual: its seconds per step without waiting for others, and the median of the other ranks.
        step: median seconds of a step.
        cause: ``DATA`` or ``WORK``, whichever explains more of the difference.
    """

    rank: int
    busy: float
    usual: float
    step: float
    cause: str

    @property
    def excess(self) -> float:
        """Seconds per step that the others wait for it."""
        return self.busy - self.usual

    @property
    def notable(self) -> bool:
        """Whether it deserves a warning."""
        return self.excess > NOTABLE * self.step


def slowest(windows: list[Window]) -> Straggler | None:
    """The rank that the others wait for most; None if there is only one rank."""
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
    """Sums of one rank's step times; the training thread adds to them.

    Args:
        every: steps per window. Windows end at multiples of it, so that those of all ranks match.
        host: where this rank runs.

    Attributes:
        finished: windows not yet published: the number of earlier windows (which a rollback does not reduce), the last
            step, the window.
    """

    def __init__(self, every: int, host: str) -> None:
        self._every, self._host = every, host
        self._sums = [0.0, 0.0, 0.0]
        self._steps = self._windows = 0
        self.finished: deque[tuple[int, int, Window]] = deque(maxlen=_PENDING)

    def add(self, step: int, seconds: float, data: float, communication: float) -> None:
        """Add optimizer step number ``step``."""
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
    """Collects the windows of all ranks on the main process, outside the steps.

    Args:
        times: what this rank has measured.
        path: file to which the main process writes a line per window.
    """

    def __init__(self, times: StepTimes, path: Path) -> None:
        self._times = times
        self._writer = MetricsWriter(path)
        self._open: deque[tuple[int, int]] = deque(maxlen=_PENDING)
        self._published: deque[str] = deque()
        self._quiet_until = 0.0
        self._write_record: Callable[[dict[str, Any]], None] = self._write

    def exchange(self, board: StatusBoard) -> None:
        """Publish the windows finished since the last call; on the main process, report the complete ones."""
        while self._times.finished:
            number, step, window = self._times.finished.popleft()
            board.put(key := _key(number, board.rank), [window.step, window.data, window.communication, window.host])
            self._published.append(key)
            self._open.append((number, step))
            if len(self._published) > 2 * _PENDING:
                board.drop(self._published.popleft())
        if board.rank != 0:
            return
        for number, step in list(self._open):
            texts = board.get_all([_key(number, rank) for rank in range(board.world_size)])
            if texts is None:
                break  # in order; the oldest is dropped when too many wait
            self._open.remove((number, step))
            self._report(step, [Window(*values) for values in texts])

    def finish(self, board: StatusBoard, seconds: float = 1.0) -> None:
        """Exchange for the last time; the main process waits up to ``seconds`` for the others' last window."""
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
                self._quiet_until = time.monotonic() + SECONDS_BETWEEN_WARNINGS
                logger.warning("%s", warning(step, slow, windows))
        self._write_record(record)

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._writer.write(record)
        except OSError as error:
            logger.warning("%s cannot be written (%s). Stragglers are only logged.", self._writer.path, error)
            self._write_record = lambda record: None


def quantiles(values: Sequence[float]) -> list[float]:
    """Minimum, median, 90 % quantile and maximum of ``values``."""
    ordered = sorted(values)
    return [ordered[round(quantile * (len(ordered) - 1))] for quantile in _QUANTILES]


def _key(window: int, rank: int) -> str:
    return f"windows/{window}/{rank}"


def warning(step: int, slow: Straggler, windows: list[Window]) -> str:
    """The warning for the log."""
    window = windows[slow.rank]
    return (
        f"Step {step}: slowest rank {slow.rank} ({window.host}): busy {slow.busy:.3f} s per step, "
        f"{slow.busy / max(slow.usual, 1e-9):.2f} times the others' {slow.usual:.3f} s; they wait {slow.excess:.3f} s "
        f"of {slow.step:.3f} s for it. The cause is {slow.cause}: {window.data:.3f} s waiting for data, "
        f"{window.work:.3f} s of work, {window.communication:.3f} s waiting for other ranks."
    )

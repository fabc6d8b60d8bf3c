"""The history of a run: ``run_history.jsonl``, what happened to it in every process that trained it.

``metrics.jsonl`` has the curve: a resumed run drops the steps that it repeats. The history drops nothing, so that time
lost to restarts can be counted. Events, one JSON object per line, each with ``time`` (seconds since 1970):

- ``start``: a process begins to train; what it trains, how and on what (:mod:`ds_trainer.monitor.report.facts`).
- ``progress``: the step reached, and seconds by phase so far in this process.
- ``message``: a warning, an error, or the result of a check.
- ``end``: how the process ended. A process that was killed has no such line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.monitor.metrics_file import MetricsWriter, read_records
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.secrets import without_secrets

logger = get_logger("monitor.report")

HISTORY_NAME = "run_history.jsonl"
SECONDS_BETWEEN_PROGRESS = 5.0
STARTED = "started"
"""Key of the event ``start``: False if the process ended before its first step, else missing."""


class RunHistory:
    """Writes the history of one process. Threads may share it. A disk error is one warning, and no more events.

    Args:
        directory: output directory of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._writer: MetricsWriter | None = MetricsWriter(directory / HISTORY_NAME)
        self._lock = threading.RLock()
        self._next = 0.0

    def start_new(self) -> None:
        """Begin the history of a new run. That of an earlier one is renamed to ``run_history.previous.jsonl``."""
        self._do(lambda writer: writer.start_new())

    def add(self, event: str, values: Mapping[str, Any]) -> None:
        """Append an event."""
        self._do(
            lambda writer: writer.write({"event": event, "time": round(time.time(), 3), **without_secrets(values)})
        )

    def progress(self, step: int, seconds: Mapping[str, float]) -> None:
        """Append the progress, at most every few seconds."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS_BETWEEN_PROGRESS
            self.add("progress", {"step": step, "seconds": rounded(seconds)})

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()

    def _do(self, action: Callable[[MetricsWriter], object]) -> None:
        with self._lock:
            writer = self._writer
            if writer is None:
                return
            try:
                action(writer)
                return
            except OSError as error:
                self._writer, reason = None, error
        # Without the lock: a thread that logs may be waiting for it, and holds the lock of the log.
        logger.warning("%s cannot be written (%s); the report of the run lacks what happens now", writer.path, reason)


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds with milliseconds."""
    return {name: round(value, 3) for name, value in seconds.items()}


@dataclass
class Session:
    """One process (rank 0) that trained the run.

    Attributes:
        start: the event ``start``; empty if the history has none.
        step: the last step known.
        time: time of the last sign of life, seconds since 1970.
        seconds: seconds by phase up to then.
        messages: events ``message``, oldest first.
        end: the event ``end``; None if the process was killed or is still running.
    """

    start: dict[str, Any]
    step: int = 0
    time: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def began(self) -> float:
        """When the process began to take its devices, seconds since 1970."""
        return float(self.start.get("process_started") or self.start.get("time") or 0.0)

    @property
    def first_step(self) -> int:
        """Optimizer steps done before."""
        return int(self.start.get("step") or 0)

    @property
    def wall_seconds(self) -> float:
        """Seconds from the start of the process to its last sign of life."""
        return max(0.0, self.time - self.began)


def read_sessions(directory: Path) -> list[Session]:
    """The processes that trained the run in ``directory``, oldest first; empty without a history."""
    sessions: list[Session] = []
    for record in read_records(directory / HISTORY_NAME):
        event, moment = record.get("event"), record.get("time")
        if event == "start":
            sessions.append(Session(record, step=_number(record.get("step"))))
        elif not sessions:
            continue
        session = sessions[-1]
        if isinstance(moment, (int, float)):
            session.time = max(session.time, float(moment))
        if event == "message":
            session.messages.append(record)
        elif event in ("progress", "end"):
            session.step = _number(record.get("step"), session.step)
            if isinstance(record.get("seconds"), dict):
                session.seconds = record["seconds"]
            if event == "end":
                session.end = record
    return sessions


def _number(value: Any, otherwise: int = 0) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise

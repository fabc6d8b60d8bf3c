"""Shows the dashboard: in place on a terminal, once as plain text elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ds_trainer.monitor.dashboard.screen import screen_lines
from ds_trainer.monitor.metrics_file import read_records
from ds_trainer.monitor.report.history import HISTORY_NAME, read_sessions
from ds_trainer.monitor.report.outcome import outcome_of
from ds_trainer.monitor.report.run_files import METRICS_NAME, RunFiles, is_number
from ds_trainer.utils.files import parse_json

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_HOME, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_PLAIN_SIZE = (100, 40)
_STRAGGLERS = Path("health") / "stragglers.jsonl"


class RunFollower:
    """What is known about a run, read again where it has changed.

    Args:
        directory: output directory of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._metrics = MetricsFollower(directory / METRICS_NAME)
        self._stamps: dict[Path, tuple[int, int] | None] = {}
        self._files = RunFiles(directory, [], [])

    def read(self) -> RunFiles:
        """The state of the run now."""
        self._metrics.read()
        files = replace(self._files, records=self._metrics.records)
        if self._changed(self._directory / HISTORY_NAME):
            files = replace(files, sessions=read_sessions(self._directory))
        if self._changed(self._directory / _STRAGGLERS):
            files = replace(files, stragglers=read_records(self._directory / _STRAGGLERS)[-1:])
        self._files = files
        return files

    def age(self) -> float | None:
        """Seconds since the metrics file changed; None if there is none."""
        stamp = _stamp(self._directory / METRICS_NAME)
        return None if stamp is None else max(0.0, time.time() - stamp[0] / 1e9)

    def _changed(self, path: Path) -> bool:
        stamp = _stamp(path)
        before, self._stamps[path] = self._stamps.get(path), stamp
        return stamp != before


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def show_once(directory: Path, stream: TextIO) -> None:
    """Print the dashboard as plain text."""
    run = RunFollower(directory)
    width, height = shutil.get_terminal_size(_PLAIN_SIZE)
    stream.write("\n".join(line.rstrip() for line in screen_lines(run.read(), width, height, run.age())) + "\n")
    stream.flush()


def show(directory: Path, stream: TextIO, seconds: float, has_ended: Callable[[RunFiles], bool] | None = None) -> bool:
    """Show the dashboard on the terminal ``stream``, every ``seconds``, until the run ends or Ctrl-C.

    The size of the terminal is read every time. The last state stays on the screen.

    Args:
        directory: output directory of the run.
        stream: a terminal.
        seconds: between two reads.
        has_ended: whether there is no more to show; default: the files of the run say so.

    Returns:
        Whether the run has ended.
    """
    has_ended = has_ended or (lambda files: outcome_of(files).state not in ("running", "unknown"))
    run = RunFollower(directory)
    stream.write(_OTHER_SCREEN + _HIDE_CURSOR)
    try:
        while True:
            files = run.read()
            # Columns and lines; the last line stays empty, so that nothing scrolls.
            size = os.get_terminal_size(stream.fileno())
            lines = screen_lines(
                files, (size.columns or _PLAIN_SIZE[0]) - 1, (size.lines or _PLAIN_SIZE[1]) - 1, run.age()
            )
            text = f"{_TO_END_OF_LINE}\r\n".join(lines)
            stream.write(f"{_HOME}{text}{_TO_END_OF_LINE}{_TO_END_OF_SCREEN}")
            stream.flush()
            if has_ended(files):
                ended = True
                break
            time.sleep(seconds)
    except KeyboardInterrupt:
        ended = False
    finally:
        stream.write(_SHOW_CURSOR + _FIRST_SCREEN)
        stream.flush()
    show_once(directory, stream)
    return ended


_MOST_BYTES = 64 * 2**20  # read at once: a longer file is read over several calls


class MetricsFollower:
    """The records of a metrics file so far. Only what is new is read.

    A file that was replaced (a resumed run drops the steps that it repeats), rotated or truncated is read again from
    its beginning. If the steps go back within the file (runs that append to it, a rollback), later steps are dropped:
    there is one value for a step. Lines that are not complete yet wait; other lines that are no records are left
    out.

    Args:
        path: the file; it need not exist yet.

    Attributes:
        records: oldest first.
        unreadable: number of lines that were left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restart(None)

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self.records: list[dict[str, Any]] = []
        self.unreadable = 0
        self._identity = identity
        self._offset = 0
        self._rest = b""
        self._first = b""

    def read(self) -> bool:
        """Read what is new. Returns whether there was anything."""
        try:
            with open(self._path, "rb") as stream:
                status = os.fstat(stream.fileno())
                identity = status.st_dev, status.st_ino
                if identity != self._identity or status.st_size < self._offset or not self._begins_alike(stream):
                    self._restart(identity)
                stream.seek(self._offset)
                data = stream.read(_MOST_BYTES)
        except FileNotFoundError:
            changed = bool(self.records)
            self._restart(None)
            return changed
        if not self._first:
            self._first = data[:64]
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._add(line)
        return bool(data)

    def _begins_alike(self, stream: Any) -> bool:
        """Whether the file is the one read so far: truncated and written again, it may be longer than before."""
        return not self._first or stream.read(len(self._first)) == self._first

    def _add(self, line: bytes) -> None:
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):  # a line of a killed writer, or binary data
            record = None
        if not isinstance(record, dict):
            self.unreadable += 1
            return
        step = record.get("step")
        if is_number(step):
            while self.records and is_number(self.records[-1].get("step")) and self.records[-1]["step"] > step:
                self.records.pop()
        self.records.append(record)

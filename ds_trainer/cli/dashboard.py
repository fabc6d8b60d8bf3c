"""``ds-trainer dashboard``: shows a run in the terminal while it trains."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ds_trainer.monitor.dashboard.screen import screen_lines
from ds_trainer.monitor.metrics_file import read_records
from ds_trainer.monitor.report.history import HISTORY_NAME, read_sessions
from ds_trainer.monitor.report.outcome import outcome_of
from ds_trainer.monitor.report.run_files import METRICS_NAME, RunFiles, is_number
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE
from ds_trainer.utils.files import directory_problem, parse_json
from ds_trainer.utils.output_files import set_aside

HELP = "show a run in the terminal while it trains"
DESCRIPTION = (
    "Show curves, speed, memory and ranks of the run in RUN, from its files: start it in any shell on a machine that "
    "sees them. Ctrl-C ends the dashboard, not the run. Without a terminal it prints one snapshot."
)

LOG_NAME = "train.log"
_SHOWN_LINES = 25


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", type=Path, help="output directory of the run")
    parser.add_argument("--refresh", type=float, metavar="SECONDS", default=1.0, help="time between two reads")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the subcommand.

    Raises:
        ConfigError: there is no such directory, or an option is wrong.
    """
    if overrides:
        raise ConfigError(f"dashboard takes no {overrides[0]}: its argument is RUN.")
    if (problem := directory_problem(options.run)) or not options.run.is_dir():
        raise ConfigError(f"{options.run} {problem or 'is not a directory'}: pass the output directory of a training.")
    if not (math.isfinite(options.refresh) and options.refresh > 0):
        raise ConfigError(f"--refresh {options.refresh} must be a positive number of seconds.")
    if options.once or not sys.stdout.isatty():
        show_once(options.run, sys.stdout)
    else:
        show(options.run, sys.stdout, options.refresh)
    return DONE


def train_with_dashboard(words: Sequence[str], directory: Path) -> int:
    """Run ``ds-trainer`` with ``words`` as a process of its own, and show the run in this terminal.

    Ctrl-C and SIGTERM stop the run, as they would without the dashboard. What it prints is in ``train.log``, whose end
    is printed when the run has ended.

    Args:
        words: the arguments.
        directory: output directory of the run.

    Returns:
        The exit code of the run.

    Raises:
        ConfigError: this is one of several ranks.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError("--dashboard is for a run of one process. Use `ds-trainer dashboard RUN` in another shell.")
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / LOG_NAME
    if log.is_file() and log.stat().st_size:
        set_aside(log)
    with open(log, "wb") as output:
        # A session of its own: the terminal sends Ctrl-C to this process alone, which passes it on once.
        process = subprocess.Popen(
            [sys.executable, "-m", "ds_trainer", *words], stdout=output, stderr=output, start_new_session=True
        )

    def end(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        if not show(directory, sys.stdout, 1.0, lambda files: process.poll() is not None):
            print("Stopping the run; Ctrl-C again ends it at once.", flush=True)
            process.send_signal(signal.SIGINT)
        code = _wait(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join([f"The last lines of {log}:", *lines[-_SHOWN_LINES:]]), flush=True)
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code, as a shell gives it. Every Ctrl-C is passed on."""
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


# Shows the dashboard: in place on a terminal, once as plain text elsewhere.


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

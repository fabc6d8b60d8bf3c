"""``MetricsFollower``: reads a metrics file that another process appends to, replaces or truncates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ds_trainer.monitor.report.run_files import is_number

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
            record = json.loads(line)
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

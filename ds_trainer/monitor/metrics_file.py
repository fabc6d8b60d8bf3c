"""The metrics file of a run: one JSON object per line, readable during the run and after a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ds_trainer.utils.files import parse_json, write_text_atomic
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.output_files import set_aside
from ds_trainer.utils.secrets import without_secrets

logger = get_logger("monitor.records")

LOSSES = ("loss", "distillation_loss")
"""Names of the training loss. Losses of evaluations are of the same kind as the first alone."""


def plain(value: Any) -> Any:
    """``value`` in JSON types: scalars of torch and numpy become numbers, arrays become lists.

    Mappings and sequences are converted element by element; any other object becomes its ``repr``.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)  # also for IntEnum, which would print its name
    if isinstance(value, float):
        return float(value)  # numpy.float64 is a float that prints itself as np.float64(...)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    to_list = getattr(value, "tolist", None)  # torch tensors, numpy arrays and scalars; a number if zero-dimensional
    return plain(to_list()) if callable(to_list) else repr(value)


def metric_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as one record of a metrics file, strict JSON.

    JSON knows neither NaN nor infinity, and readers disagree about what to make of them: such a value is written as
    null, and ``<name>_nonfinite`` next to it is ``"nan"``, ``"inf"`` or ``"-inf"``. Inside lists and mappings it is
    null only.
    """
    record: dict[str, Any] = {}
    for name, value in values.items():
        value = plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            record[name] = None
            record[f"{name}_nonfinite"] = str(value)
        else:
            record[name] = without_secrets(without_nonfinite(value))
    return record


def without_nonfinite(value: Any) -> Any:
    """``value`` with null in place of every number that JSON does not know, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nonfinite(item) for item in value]
    return value


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file, oldest first; an empty list if there is no such file.

    Lines that are not JSON objects (the truncated last line of a killed run) are left out, with one warning that gives
    their number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    unreadable: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):  # also numbers of too many digits
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            unreadable.append(number)
    if unreadable:
        logger.warning(
            "%s: ignored %d line(s) that are not complete records (the first is line %d)",
            path,
            len(unreadable),
            unreadable[0],
        )
    return records


class MetricsWriter:
    """Appends records to ``path``, each flushed to the operating system before :meth:`write` returns.

    If the file may already exist, call :meth:`start_new` or :meth:`resume_at` first. Only one process may write.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stream: TextIO | None = None

    def start_new(self) -> None:
        """Start an empty file. That of an earlier run is kept as ``<stem>.previous<suffix>``."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > 0:
            set_aside(self.path)
        write_text_atomic(self.path, "")

    def resume_at(self, step: int) -> dict[str, Any] | None:
        """Drop the records after ``step``, so that repeated steps are not in the curve twice.

        A truncated line is dropped as well. A file without steps is that of a user, and set aside.
        Returns the last remaining record, or None.
        """
        self.close()
        records = read_records(self.path)
        if not any("step" in record for record in records) and self.path.exists() and self.path.stat().st_size > 0:
            set_aside(self.path)
            records = []
        kept = [record for record in records if _step_of(record) <= step]
        write_text_atomic(self.path, "".join(_line(record) for record in kept))
        return kept[-1] if kept else None

    def write(self, values: Mapping[str, Any]) -> None:
        """Append ``values`` as one line (see :func:`metric_record`). Raises OSError if the file cannot be written."""
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  stays open from record to record
        try:
            self._stream.write(_line(metric_record(values)))
            self._stream.flush()
        except OSError:
            with suppress(OSError):  # closing tries to write the rest once more; the first error is the one to report
                self._stream.close()
            self._stream = None
            raise

    def close(self) -> None:
        """Close the file. A later :meth:`write` opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _step_of(record: Mapping[str, Any]) -> float:
    step = record.get("step", 0)
    return step if isinstance(step, (int, float)) else 0

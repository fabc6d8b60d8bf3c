"""Reads the file of an offline run of wandb: a log of protocol buffers in blocks of 32 KiB (the format of LevelDB)."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7


@dataclass
class OfflineRun:
    """What one run recorded."""

    project: str = ""
    name: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    artifacts: list[dict[str, Any]] = field(default_factory=list)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Step and value of every point of a curve."""
        return [(row["train/global_step"], row[name]) for row in self.history if name in row]

    def names(self) -> set[str]:
        """The curves, without wandb's own."""
        return {name for row in self.history for name in row if not name.startswith("_")}


def offline_runs(directory: Path) -> list[OfflineRun]:
    """The runs below ``directory``, oldest first. A process of wandb's writes them, which may take its time."""
    files = sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    deadline = time.monotonic() + 30
    while not all(_is_complete(path) for path in files) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [_read(path) for path in files]


def _is_complete(path: Path) -> bool:
    """Whether the end of the run is in its file."""
    return any(record.WhichOneof("record_type") == "exit" for record in _records(path.read_bytes()))


def _read(path: Path) -> OfflineRun:
    run = OfflineRun()
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.project, run.name, run.group = record.run.project, record.run.display_name, record.run.run_group
            run.config.update(_items(record.run.config.update))
        elif kind == "config":
            run.config.update(_items(record.config.update))
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            run.summary.update(_items(record.summary.update))
        elif kind == "metric":
            run.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "artifact":
            names = sorted(entry.path for entry in record.artifact.manifest.contents)
            run.artifacts.append({"aliases": list(record.artifact.aliases), "files": names})
    return run


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(raw: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    assert raw[:4] in (b":W&B", b"")
    position, data = _HEADER, b""
    while position + _HEADER <= len(raw):
        remaining = _BLOCK - position % _BLOCK
        if remaining < _HEADER:  # too little for another header: padding
            position += remaining
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + _HEADER])
        if position + _HEADER + length > len(raw):  # it is being written
            return
        data += raw[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            data = b""
            yield record

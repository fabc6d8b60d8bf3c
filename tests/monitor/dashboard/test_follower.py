"""A metrics file that grows, is cut, replaced, or has several runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.cli.dashboard import MetricsFollower
from ds_trainer.monitor.metrics_file import MetricsWriter


def line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, **values}) + "\n"


def steps(follower: MetricsFollower) -> list[int]:
    return [record["step"] for record in follower.records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_growing_file_is_read_piece_by_piece(path: Path) -> None:
    follower = MetricsFollower(path)
    assert not follower.read() and follower.records == []
    text = "".join(line(step, loss=float(step)) for step in range(1, 30))
    for end in range(0, len(text), 17):  # a line may be half there
        path.write_text(text[:end])
        follower.read()
        assert steps(follower) == list(range(1, 1 + text[:end].count("\n")))
    path.write_text(text)
    assert follower.read() and steps(follower) == list(range(1, 30)) and follower.unreadable == 0
    assert not follower.read()


def test_a_resumed_run_replaces_the_file(path: Path) -> None:
    writer, follower = MetricsWriter(path), MetricsFollower(path)
    writer.start_new()
    for step in range(1, 10):
        writer.write({"step": step, "loss": 1.0})
    follower.read()
    writer.resume_at(5)
    writer.write({"step": 6, "loss": 2.0})
    follower.read()
    assert steps(follower) == [1, 2, 3, 4, 5, 6] and follower.records[-1]["loss"] == 2.0


@pytest.mark.parametrize("longer", [False, True])
def test_a_truncated_file_is_read_again(longer: bool, path: Path) -> None:
    path.write_text("".join(line(step) for step in range(1, 10)))
    follower = MetricsFollower(path)
    follower.read()
    text = "".join(line(step, loss=0.5) for step in range(1, 4 if not longer else 100))
    with open(path, "r+") as stream:  # the same inode
        stream.truncate(0)
        stream.write(text)
    follower.read()
    assert len(follower.records) == text.count("\n") and follower.records[0]["loss"] == 0.5


def test_a_rotated_file_begins_anew(path: Path) -> None:
    path.write_text(line(1) + line(2))
    follower = MetricsFollower(path)
    follower.read()
    os.replace(path, path.with_name("metrics.previous.jsonl"))
    assert follower.read() and follower.records == []
    path.write_text(line(1))
    follower.read()
    assert steps(follower) == [1]


def test_of_several_runs_in_one_file_the_last_counts(path: Path) -> None:
    path.write_text("".join(line(step, loss=9.0) for step in range(1, 8)) + line(1, loss=1.0) + line(2, loss=1.0))
    follower = MetricsFollower(path)
    follower.read()
    assert [(record["step"], record["loss"]) for record in follower.records if record["loss"] == 1.0] == [
        (1, 1.0),
        (2, 1.0),
    ]
    assert max(steps(follower)) == 2


def test_lines_that_are_no_records_are_left_out(path: Path) -> None:
    path.write_bytes(line(1).encode() + b"\xff\xfe\n[1]\n{broken\n\n" + line(2).encode() + b'{"step": 3')
    follower = MetricsFollower(path)
    follower.read()
    assert steps(follower) == [1, 2] and follower.unreadable == 3

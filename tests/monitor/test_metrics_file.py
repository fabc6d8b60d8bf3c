"""The metrics file: strict JSON, one record a line, whole after a crash and after a resume."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.monitor.metrics_file import MetricsWriter, metric_record, plain, read_records

from .conftest import LogRecords


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def strict(line: str) -> Any:
    """Parse as a reader would that refuses NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_every_record_can_be_read_before_the_next(path: Path) -> None:
    writer = MetricsWriter(path)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": 1 / step})
        assert read_records(path)[-1] == {"step": step, "loss": 1 / step}
    assert len(path.read_text().splitlines()) == 3


def test_writing_after_close_reopens_the_file(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.write({"step": 1})
    writer.close()
    writer.close()
    writer.write({"step": 2})
    assert read_records(path) == [{"step": 1}, {"step": 2}]


def test_non_finite_values_are_null_and_named(path: Path) -> None:
    MetricsWriter(path).write({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0, "e": [1.0, {"x": math.nan}]})
    assert strict(path.read_text()) == {
        "a": None, "a_nonfinite": "nan", "b": None, "b_nonfinite": "inf", "c": None, "c_nonfinite": "-inf",
        "d": 1.0, "e": [1.0, {"x": None}]
    }  # fmt: skip


def test_scalars_of_torch_and_numpy_are_numbers() -> None:
    import numpy
    import torch

    class Level(IntEnum):
        HIGH = 3

    values = {
        "tensor": torch.tensor(0.5), "int": numpy.int64(7), "float": numpy.float64(0.25), "nan": torch.tensor(math.nan),
        "array": numpy.arange(2), "enum": Level.HIGH, "bool": True, "none": None, "tuple": (1, 2), "path": Path("x")
    }  # fmt: skip
    assert json.loads(json.dumps(metric_record(values))) == {
        "tensor": 0.5, "int": 7, "float": 0.25, "nan": None, "nan_nonfinite": "nan",
        "array": [0, 1], "enum": 3, "bool": True, "none": None, "tuple": [1, 2], "path": repr(Path("x"))
    }  # fmt: skip
    assert type(plain(numpy.float64(1.0))) is float


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_any_record_is_one_line_of_strict_json(values: dict[str, Any]) -> None:
    line = json.dumps(metric_record(values), allow_nan=False)
    assert "\n" not in line
    for name, value in strict(line).items():
        if name in values and not isinstance(values[name], (float, list, dict)):
            assert value == values[name]


def test_a_missing_file_has_no_records(path: Path) -> None:
    assert read_records(path) == []


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step"', "\x00\x00\x00", "17", b'{"name": "\xc3'])
def test_a_torn_last_line_is_left_out_with_a_warning(path: Path, torn: str | bytes, log: LogRecords) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + (torn if isinstance(torn, bytes) else torn.encode()))
    assert read_records(path) == [{"step": 1}, {"step": 2}]
    assert len(log.messages) == 1 and "1 line(s)" in log.text and "line 3" in log.text


def test_resuming_drops_records_of_steps_that_are_repeated(path: Path) -> None:
    writer = MetricsWriter(path)
    for step in range(10, 60, 10):
        writer.write({"step": step, "loss": 1.0, "time": step / 2})
        writer.write({"step": step, "eval_loss": 2.0})
    writer.close()
    with path.open("a") as stream:
        stream.write('{"step": 6')

    resumed = MetricsWriter(path)
    assert resumed.resume_at(30) == {"step": 30, "eval_loss": 2.0}
    resumed.write({"step": 40, "loss": 0.5})
    steps = [record["step"] for record in read_records(path)]
    assert steps == [10, 10, 20, 20, 30, 30, 40]
    assert len(path.read_text().splitlines()) == 7  # the torn line is removed too


def test_resuming_without_a_file_creates_one(path: Path) -> None:
    writer = MetricsWriter(path)
    assert writer.resume_at(30) is None
    writer.write({"step": 31})
    assert read_records(path) == [{"step": 31}]


def test_a_record_without_a_step_is_kept(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.write({"note": "hello"})
    writer.write({"step": 9})
    assert writer.resume_at(3) == {"note": "hello"}


def test_a_new_run_renames_the_old_file(path: Path) -> None:
    first = MetricsWriter(path)
    first.start_new()
    assert path.read_text() == ""
    first.write({"step": 1, "run": "first"})
    second = MetricsWriter(path)
    second.start_new()
    second.write({"step": 1, "run": "second"})
    assert read_records(path) == [{"step": 1, "run": "second"}]
    assert read_records(path.with_name("metrics.previous.jsonl")) == [{"step": 1, "run": "first"}]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["metrics.jsonl", "metrics.previous.jsonl"]


def test_an_empty_old_file_is_not_kept(path: Path) -> None:
    MetricsWriter(path).start_new()
    MetricsWriter(path).start_new()
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_and_writing_resumes_later(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    writer = MetricsWriter(path)
    with pytest.raises(OSError, match="space"):
        writer.write({"step": 1})
    path.unlink()
    writer.write({"step": 2})
    writer.close()
    assert read_records(path) == [{"step": 2}]


def test_a_killed_run_leaves_complete_records(path: Path) -> None:
    code = (
        "import sys, itertools; from ds_trainer.monitor.metrics_file import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1])\n"
        "for step in itertools.count(1): w.write({'step': step, 'pad': 'x' * 300})"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as process:
        deadline = time.monotonic() + 30
        while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    records = read_records(path)
    assert len(records) > 300
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    MetricsWriter(path).resume_at(100)
    assert [record["step"] for record in read_records(path)] == list(range(1, 101))

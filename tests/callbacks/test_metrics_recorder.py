"""What is kept of a run: ``metrics.jsonl``, and charts beside baselines."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.monitor.metrics_file import read_records

from .conftest import LogRecords


class Run:
    """A process that trains: the events in the order of the loop, a log every five steps."""

    def __init__(
        self, output_dir: Path, *, step: int = 0, callback: MetricsFileCallback | None = None, **state: Any
    ) -> None:
        self.handler = CallbackHandler([callback or MetricsFileCallback()])
        self.args = SimpleNamespace(output_dir=str(output_dir))
        self.state = TrainerState(max_steps=100, global_step=step, **state)
        self.control = TrainerControl()

    def fire(self, event: str, *result: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, *result)

    def train(self, until: int) -> None:
        self.fire("on_train_begin")
        while self.state.global_step < until:
            self.state.global_step += 5
            self.state.epoch = self.state.global_step / 50
            self.fire("on_log", {"loss": 10.0 / self.state.global_step, "epoch": self.state.epoch})

    def evaluate(self, loss: float) -> None:
        self.fire("on_log", {"eval_loss": loss})
        self.fire("on_evaluate", {"eval_loss": loss})


def steps(output_dir: Path) -> list[int]:
    return [record["step"] for record in read_records(output_dir / "metrics.jsonl")]


def test_each_log_is_a_line_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "out")
    run.train(until=10)
    first, second = read_records(tmp_path / "out" / "metrics.jsonl")
    assert list(first) == ["step", "epoch", "time", "loss"]
    assert (first["step"], first["epoch"], first["loss"]) == (5, 0.1, 2.0)
    assert (second["step"], second["epoch"], second["loss"]) == (10, 0.2, 1.0)
    assert 0.0 <= first["time"] <= second["time"] < 5.0
    run.fire("on_train_end")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]  # no figure that nobody asked for


def test_step_and_epoch_of_the_run_override_logs_of_the_same_name(tmp_path: Path) -> None:
    run = Run(tmp_path, step=0)
    run.train(until=5)
    logs = {"step": 99, "time": -1.0, "epoch": 77.0, "other": 3}
    run.fire("on_log", logs)
    record = read_records(tmp_path / "metrics.jsonl")[-1]
    assert (record["step"], record["epoch"], record["other"]) == (5, 0.1, 3) and record["time"] >= 0.0
    assert logs == {"step": 99, "time": -1.0, "epoch": 77.0, "other": 3}


def test_a_non_finite_loss_is_null(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(until=5)
    run.fire("on_log", {"loss": float("nan")})
    record = read_records(tmp_path / "metrics.jsonl")[-1]
    assert record["loss"] is None and record["loss_nonfinite"] == "nan"


def test_a_resumed_run_continues_the_curve_and_the_clock(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.train(until=40)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 45, "lo')  # killed while it wrote
    before = read_records(tmp_path / "metrics.jsonl")
    time.sleep(0.02)

    resumed = Run(tmp_path, step=20)
    resumed.train(until=40)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert records[:4] == before[:4]
    times = [record["time"] for record in records]
    assert times == sorted(times)
    assert not (tmp_path / "metrics.previous.jsonl").exists()


def test_the_clock_of_a_resumed_run_continues(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "time": 1000.0, "loss": 1.0}\n{"step": 25, "time": 1300.0}\n')
    resumed = Run(tmp_path, step=20)
    resumed.train(until=25)
    assert 1000.0 <= read_records(tmp_path / "metrics.jsonl")[-1]["time"] < 1005.0


def test_resuming_without_earlier_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "note": "no time"}\n')
    resumed = Run(tmp_path, step=20)
    resumed.train(until=25)
    assert steps(tmp_path) == [20, 25]
    Run(tmp_path / "elsewhere", step=20).train(until=25)
    assert steps(tmp_path / "elsewhere") == [25]


def test_a_new_run_in_the_same_directory_keeps_the_old_records(tmp_path: Path) -> None:
    callback = MetricsFileCallback()
    Run(tmp_path, callback=callback).train(until=20)
    Run(tmp_path, callback=callback).train(until=10)
    assert steps(tmp_path) == [5, 10]
    assert [record["step"] for record in read_records(tmp_path / "metrics.previous.jsonl")] == [5, 10, 15, 20]


def test_an_evaluation_of_the_finished_model_is_recorded_and_drawn(tmp_path: Path) -> None:
    run = Run(tmp_path, callback=MetricsFileCallback({"gzip -9": 1.5}))
    run.train(until=20)
    run.evaluate(2.0)
    assert not (tmp_path / "loss.svg").exists()
    run.fire("on_train_end")
    assert "gzip -9" in (drawn := (tmp_path / "loss.svg").read_text()) and drawn.count("<circle") == 1
    run.evaluate(1.0)
    assert (tmp_path / "loss.svg").read_text().count("<circle") == 2
    assert [record.get("eval_loss") for record in read_records(tmp_path / "metrics.jsonl")[-2:]] == [2.0, 1.0]


def test_evaluation_without_training_writes_nothing(tmp_path: Path) -> None:
    Run(tmp_path).evaluate(2.0)
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", is_world_process_zero=False)
    run.train(until=20)
    run.evaluate(1.0)
    run.fire("on_train_end")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_training(tmp_path: Path, log: LogRecords) -> None:
    run = Run(tmp_path)
    run.fire("on_train_begin")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log.messages.clear()
    for _ in range(3):
        run.fire("on_log", {"loss": 1.0})
    run.fire("on_train_end")
    assert len(log.messages) == 1 and log.messages[0].startswith("WARNING") and "without records" in log.text


def test_a_plot_that_cannot_be_written_does_not_end_the_training(tmp_path: Path, log: LogRecords) -> None:
    run = Run(tmp_path, callback=MetricsFileCallback({"gzip -9": 1.5}))
    run.train(until=10)
    (tmp_path / "loss.svg").mkdir()
    log.messages.clear()
    run.fire("on_train_end")
    assert len(log.messages) == 1 and "The charts of the run cannot be written" in log.text
    assert steps(tmp_path) == [5, 10]


def test_an_unwritable_output_directory_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where a directory should be")
    with pytest.raises(OSError, match="out"):
        Run(tmp_path / "out").train(until=5)

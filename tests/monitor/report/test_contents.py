"""Parts of a report, from files that are made for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.order import epoch_order
from ds_trainer.monitor.report.advice import LOST, PROCESS, time_use
from ds_trainer.monitor.report.charts import log_ticks, nice_ticks
from ds_trainer.monitor.report.contents import MOST_POINTS, Spike, read_report, thinned, with_samples
from ds_trainer.monitor.report.facts import changed_arguments, command_line
from ds_trainer.monitor.report.run_files import RunFiles
from ds_trainer.monitor.report.writing import write_report
from ds_trainer.monitor.throughput import BACKWARD, COMMUNICATION, DATA, FORWARD, PhaseClock
from tests.monitor.report.example_run import STEPS, example_run, write_lines
from tests.monitor.report.test_reports_of_runs import arguments
from tests.support.models import RaggedTokens, tiny_llama


def test_phases_are_measured_and_waits_are_communication() -> None:
    now, waited = [0.0], [0.0]
    clock = PhaseClock(lambda: waited[0], lambda: now[0])

    def later(seconds: float, waits: float = 0.0) -> None:
        now[0] += seconds
        waited[0] += waits

    later(1.0)
    clock.enter(DATA)
    later(2.0, waits=0.5)
    clock.enter(FORWARD)
    for _ in range(2):
        later(3.0)
        with clock.backward:
            later(4.0, waits=1.0)
    with clock.inside("evaluation"):
        later(10.0, waits=5.0)  # waits of an evaluation are part of it
    later(0.25)
    found = clock.seconds()
    assert found == {
        "start of the training": 1.0,
        DATA: 1.5,
        FORWARD: 6.25,
        BACKWARD: 6.0,
        COMMUNICATION: 2.5,
        "evaluation": 10.0,
    }
    assert sum(found.values()) == now[0]


def test_the_time_of_a_run_adds_up_and_lost_steps_are_counted(tmp_path: Path) -> None:
    use = time_use(RunFiles.read(example_run(tmp_path)))
    assert use.total == pytest.approx(1005 + 580)  # both processes, without what lies between
    assert use.between == pytest.approx(205) and use.repeated_steps == 30
    assert use.parts[LOST] == pytest.approx(1005 - 940)  # since the checkpoint from which the second one continued
    assert use.parts[PROCESS] == pytest.approx(40 + 30)


def test_spikes_are_found_with_their_samples(tmp_path: Path) -> None:
    report = read_report(example_run(tmp_path))
    found = {(spike["name"], spike["step"]): spike for spike in report["spikes"]}
    assert found.keys() == {("loss", 210), ("grad_norm", 210), ("loss", 433), ("grad_norm", 433), ("loss", 300)}
    assert found["loss", 300]["value"] is None
    order = epoch_order(64_000, 42, 0, shuffle=True)
    assert found["loss", 210]["samples"] == order.at(np.arange(209 * 64, 209 * 64 + 32)).tolist()
    assert found["loss", 210]["more"] == 32 and found["loss", 210]["epoch"] == 0


class ReadSamples(RaggedTokens):
    """Notes which samples are read."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


def test_the_samples_named_are_those_that_were_read(tmp_path: Path) -> None:
    """Against a real loader over two epochs, with an incomplete last step."""
    data = ReadSamples(10)
    args = arguments(tmp_path, num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=1)
    Trainer(tiny_llama(), args, train_dataset=data).train()
    files = RunFiles.read(tmp_path)
    named = [with_samples(Spike("loss", step, step, 1.0, 1.0), files) for step in range(1, 7)]
    assert [spike.epoch for spike in named] == [0, 0, 0, 1, 1, 1]
    assert [len(spike.samples or ()) for spike in named] == [4, 4, 2] * 2
    assert [sample for spike in named for sample in spike.samples or ()] == data.read[-20:]


def test_a_thinned_curve_keeps_its_spikes() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[7] = (7.0, -3.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 1 and [54_321.0, 9.0] in kept and [7.0, -3.0] in kept
    assert kept[0][0] == 0.0 and kept[-1] == [99_999.0, 1.0] and kept == sorted(kept)


@pytest.mark.extended
def test_a_monstrous_run_stays_below_two_megabytes(tmp_path: Path) -> None:
    names = [f"quantity_{number}" for number in range(60)]
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": step, "loss": math.sin(step) + 2, **{name: step * 1.23456789 for name in names}}
            for step in range(1, 3000)
        ],
    )
    run = example_run(tmp_path / "other")
    history = (run / "run_history.jsonl").read_text().splitlines()
    history[1:1] = [json.dumps({"event": "message", "time": 1.0, "level": "WARNING", "text": "x" * 5000})] * 300
    (tmp_path / "run_history.jsonl").write_text("\n".join(history) + "\n")
    data = {"samples": [{"source": "a", "pieces": [{"text": "y" * 1_000_000, "trained": True}]}] * 20}
    (tmp_path / "data_card.json").write_text(json.dumps(data))
    assert write_report(tmp_path).stat().st_size < 2_000_000


@pytest.mark.parametrize("name", ["run_history.jsonl", "metrics.jsonl", "data_card.json", "health/stragglers.jsonl"])
@pytest.mark.parametrize(
    "content", ["", "{", '{"step": "x", "event": 3}\n[]\n\x00\n', '{"event": "start"}\n{"event": "end"}\n']
)
def test_files_that_are_cut_or_wrong_do_not_prevent_a_report(name: str, content: str, tmp_path: Path) -> None:
    run = example_run(tmp_path)
    (run / name).write_text(content)
    assert write_report(run).exists()


@pytest.mark.parametrize(
    "card",
    [
        {"figures": 3, "sources": "x", "lengths": [], "samples": {}},
        {"sources": [3, {"name": None}], "lengths": {"edges": ["a"], "counts": None}, "samples": [{"pieces": 3}, 4]},
        {"lengths": {"edges": [1], "counts": [1, 2, 3]}, "samples": [{"pieces": ["x", {"text": None}]}]},
    ],
)
def test_a_data_card_of_another_form_does_not_prevent_a_report(card: dict[str, Any], tmp_path: Path) -> None:
    run = example_run(tmp_path)
    (run / "data_card.json").write_text(json.dumps(card))
    assert write_report(run).exists()


def test_nothing_from_the_run_is_html(tmp_path: Path) -> None:
    run = example_run(tmp_path)
    attack = "<script>alert(1)</script>"
    for name in ("run_history.jsonl", "metrics.jsonl", "data_card.json"):
        text = (run / name).read_text()
        for word in ("chat-8b", "trained share", "What is", "eval_loss", "the loss is not", "recipe.yaml", "main"):
            text = text.replace(word, f"{word}{attack}")
        (run / name).write_text(text)
    assert attack not in write_report(run).read_text() and "&lt;script&gt;" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "of the time of steps is waiting for data"),
        ({}, "is far below the 85 GB of a device"),
        ({}, "the model begins to memorize"),
        ({}, "The loss had 3 spikes"),
        ({"mfu": 0.1}, "MFU is 10%, which is low"),
    ],
)
def test_advice_has_its_reason(change: dict[str, float], words: str, tmp_path: Path) -> None:
    run = example_run(tmp_path)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [{**record, **change} if "mfu" in record else record for record in records])
    assert words in " ".join(one["why"] for one in read_report(run)["summary"]["advice"])


def test_a_good_run_gets_no_advice(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"step": step, "loss": 3.0 / step, "time": float(step)} for step in range(1, 50)]
    records.append({"step": 49, "eval_loss": 0.1, "time": 50.0})
    write_lines(tmp_path / "metrics.jsonl", [*records, {"step": 49, "train_runtime": 50.0, "time": 50.0}])
    report = read_report(tmp_path)  # a run of an older version, without a history
    assert report["summary"]["advice"] == [] and report["summary"]["outcome"]["state"] == "finished"
    assert report["summary"]["cost"]["wall_seconds"] == 50.0 and report["summary"]["quality"]["steps"] == 49


def test_secrets_of_the_command_are_masked(tmp_path: Path) -> None:
    argv = [
        "python",
        "x.py",
        "--hub_token",
        "abc123",
        "--arguments.hub_token=def456",
        "--name",
        "hf_abcdefghijklmnopqrst",
    ]
    text = command_line(argv)
    assert not any(secret in text for secret in ("abc123", "def456", "hf_abcdefghijklmnopqrst"))
    assert text.startswith("python x.py --hub_token ")
    rows = changed_arguments(TrainingArguments(str(tmp_path), hub_token="abc123", learning_rate=1e-3, max_steps=5))
    assert {row["name"] for row in rows} >= {"hub_token", "learning_rate", "max_steps"} and "abc123" not in str(rows)


def test_ticks_are_round_and_few() -> None:
    for low, high in ((0.0, 1.0), (2.3, 2.31), (-5.0, 1e6), (1e-9, 3e-9), (0.0, 0.0)):
        ticks = nice_ticks(low, high, 5)
        assert 1 <= len(ticks) <= 6 and all(low - 1e-12 <= tick <= high * (1 + 1e-9) + 1e-12 for tick in ticks)
    assert nice_ticks(0.0, 1.0, 5) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert log_ticks(0.5, 2000.0) == [1.0, 10.0, 100.0, 1000.0] and log_ticks(1.0, 3.0) == [1.0, 2.0]


def test_the_last_step_counts(tmp_path: Path) -> None:
    assert RunFiles.read(example_run(tmp_path)).last_step == STEPS

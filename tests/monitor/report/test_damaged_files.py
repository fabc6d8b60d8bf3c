"""Reports of runs whose files have values that are no figures, or are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.cli.dashboard import MetricsFollower
from ds_trainer.monitor.metrics_file import read_records
from ds_trainer.monitor.report.run_files import is_number
from ds_trainer.monitor.report.writing import write_report
from tests.monitor.report.example_run import write_lines

LOGGED = [{"step": step, "loss": 1.0 / step} for step in range(1, 4)]
HUGE = "9" * 5000  # more digits than Python reads
LARGE = "9" * 400  # more than a float holds
DEEP = "[" * 100_000


def report_of(directory: Path, **files: str) -> tuple[str, dict[str, Any]]:
    write_lines(directory / "metrics.jsonl", LOGGED)
    for name, text in files.items():
        (directory / f"{name}.json").write_text(text)
    return written(directory)


def written(directory: Path) -> tuple[str, dict[str, Any]]:
    page = write_report(directory).read_text(encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return page, json.loads((directory / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_run_that_diverged_at_its_first_step_has_a_report(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": step, "loss": None, "loss_nonfinite": "nan"} for step in range(1, 9)]
    )
    page, content = written(tmp_path)
    assert content["not_finite"]["loss"] == list(range(1, 9))
    assert [spike["usual"] for spike in content["spikes"]] == [None] * 8
    assert "loss not finite" in page and "never finite" in page


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_values_that_json_does_not_know_are_null(tmp_path: Path, value: str) -> None:
    results = f'{{"evaluation": {{"eval_loss": {value}, "verdict": "the model has learned nothing"}}}}'
    page, content = report_of(tmp_path, results=results, data_card=f'{{"figures": {{"share": {value}}}}}')
    assert content["results"]["evaluation"]["eval_loss"] is None
    assert content["data"]["figures"]["share"] is None
    assert "the model has learned nothing" in page


@pytest.mark.parametrize("text", [f'{{"figures": {{"a": {HUGE}}}}}', DEEP], ids=["huge", "deep"])
def test_a_file_that_python_cannot_read_is_left_out(tmp_path: Path, text: str) -> None:
    _, content = report_of(tmp_path, data_card=text)
    assert content["data"] is None


def test_numbers_beyond_floats_are_no_numbers(tmp_path: Path) -> None:
    card = f'{{"figures": {{"a": 1}}, "lengths": {{"edges": [0, {LARGE}], "counts": [3]}}}}'
    page, _ = report_of(tmp_path, data_card=card)
    assert "Tokens of a sample" not in page
    assert not is_number(int(LARGE))


@pytest.mark.parametrize("line", [f'{{"step": {HUGE}}}', DEEP], ids=["huge", "deep"])
def test_records_that_python_cannot_read_are_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": {LARGE}}}\n{{"step": 2}}\n')
    assert len(read_records(path)) == 3
    follower = MetricsFollower(path)
    assert follower.read()
    assert len(follower.records) == 3 and follower.unreadable == 1


def test_half_of_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    card = {"samples": [{"source": "x.jsonl:1", "pieces": [{"text": "before \ud800 after", "trained": True}]}]}
    page, content = report_of(tmp_path, data_card=json.dumps(card))
    assert r"before \ud800 after" in page
    assert content["data"]["samples"][0]["pieces"][0]["text"] == "before ? after"


def test_no_value_of_a_file_is_markup(tmp_path: Path) -> None:
    evil = "<img src=x>"
    start = {"event": "start", "time": 1.0, "host": evil, "run_name": evil, "summary": {"max_steps": 3, "device": evil}}
    end = {"event": "end", "time": 2.0, "outcome": evil, "exit_code": evil, "text": evil, "trace": evil}
    write_lines(tmp_path / "run_history.jsonl", [start, end])
    stopped = tmp_path / "stopped"
    write_lines(stopped / "run_history.jsonl", [start, {**end, "outcome": "stopped"}])
    page, _ = report_of(tmp_path, data_card=json.dumps({"figures": {evil: evil}, "sources": [{evil: evil}]}))
    assert "&lt;img" in page
    assert "<img" not in page
    assert "<img" not in written(stopped)[0]

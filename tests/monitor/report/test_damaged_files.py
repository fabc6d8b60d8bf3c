"""Reports of runs whose files have values that are no figures, or are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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

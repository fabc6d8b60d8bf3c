"""Charts as files: what they show, and that they are whole documents."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.monitor.report.charts import smooth, stacked_file
from ds_trainer.monitor.report.writing import write_plots
from ds_trainer.utils.output_files import RECORD

SVG = "{http://www.w3.org/2000/svg}"


def metrics(folder: Path, records: list[dict[str, Any]]) -> Path:
    writer = MetricsWriter(folder / "metrics.jsonl")
    for record in records:
        writer.write(record)
    writer.close()
    return folder


def falling(steps: int) -> list[dict[str, Any]]:
    return [{"step": n, "loss": 2.0 + 3.0 * math.exp(-n / 20) + 0.1 * math.sin(n * 7)} for n in range(1, steps + 1)]


def texts(path: Path) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(path.read_text()).iter(f"{SVG}text")]


def test_the_trend_of_a_straight_line_is_that_line() -> None:
    line = [10.0 - 0.5 * index for index in range(50)]
    assert smooth(line, 5) == pytest.approx(line)


def test_the_trend_ignores_a_single_spike_and_smooths_noise() -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.1, 400)
    values = [2.0 + float(value) for value in noise]
    values[200] = 500.0
    trend = np.array(smooth(values, 10))
    assert len(trend) == 400
    assert np.abs(trend[10:-10] - 2.0).max() < 0.12
    assert smooth([], 5) == []
    assert smooth([1.0], 5) == [1.0]


def test_a_long_run_with_evaluations_and_baselines(tmp_path: Path) -> None:
    records = falling(300) + [{"step": step, "eval_loss": 2.2} for step in range(50, 301, 50)]
    assert write_plots(metrics(tmp_path, records), {"gzip -9": 3.5}) == [tmp_path / "loss.svg"]
    found = texts(tmp_path / "loss.svg")
    for wanted in ("Loss over optimizer steps", "training", "training, smoothed", "eval loss", "gzip -9"):
        assert wanted in found
    drawn = (tmp_path / "loss.svg").read_text()
    assert len(re.findall(r'<path class="line c[0-9]', drawn)) == 3 and drawn.count("<circle") == 6
    assert {path.name for path in tmp_path.iterdir()} == {RECORD, "loss.svg", "metrics.jsonl"}


def test_everything_else_that_changes_has_a_chart_of_its_own(tmp_path: Path) -> None:
    records = [
        {
            "step": n,
            "loss": 1.0,
            "learning_rate": 5.5e-4 / n,
            "a <b>": n,
            "loss/web": 2.0,
            **({"once": 7} if n == 2 else {}),
        }
        for n in range(1, 6)
    ]
    assert [path.name for path in write_plots(metrics(tmp_path, records))] == ["loss.svg", "metrics.svg"]
    document = ElementTree.fromstring((tmp_path / "metrics.svg").read_text())
    titles = [one.text for one in document.iter(f"{SVG}text") if one.get("class") == "title"]
    assert sorted(map(str, titles)) == ["a <b>", "learning rate"]
    # Labels of small values are inside of the picture: they end at their place, and a digit is at most 7 wide.
    labels = [one for one in document.iter(f"{SVG}text") if one.get("class") == "tick end"]
    assert labels and all(float(one.get("x", 0)) >= 7 * len(one.text or "") for one in labels)


def test_losses_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    write_plots(metrics(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 3, "loss": math.nan}]))
    assert (
        "step 3: loss not finite" in (tmp_path / "loss.svg").read_text()
        or "broken" in (tmp_path / "loss.svg").read_text()
    )


def test_nothing_is_drawn_without_values(tmp_path: Path) -> None:
    assert write_plots(metrics(tmp_path, [{"step": 1, "note": "text"}])) == []


def test_every_bar_has_the_sizes_of_its_parts() -> None:
    many = {f"buffer {number}": 0.1 for number in range(15)}  # more parts than colors
    bars = {"forward": {"weights": 16.0, "activations": 30.0, **many}, "step": {"weights": 16.0, "states": 8.0}}
    document = ElementTree.fromstring(stacked_file("a <plan>", bars, 80.0, "GB"))
    rows: dict[str, list[tuple[float, float, str]]] = {}
    for part in document.iter(f"{SVG}rect"):
        tip = part.find(f"{SVG}title")
        if tip is not None:
            size = float(re.findall(r": ([\d.]+) GB", tip.text or "")[0])
            rows.setdefault(part.get("y", ""), []).append((float(part.get("width", 0)), size, part.get("class", "")))
    assert [round(sum(size for _, size, _ in row), 1) for row in rows.values()] == [47.5, 24.0]
    assert len({round(width / size, 0) for row in rows.values() for width, size, _ in row if size > 1}) == 1
    level = next(one for one in document.iter(f"{SVG}path") if one.get("class") == "level")
    first = next(iter(document.iter(f"{SVG}rect"))).get("width")
    assert 0 < float((level.get("d") or "M0")[1:].split()[0]) < float(first or 0)
    assert "a <plan>" in [one.text for one in document.iter(f"{SVG}text")]

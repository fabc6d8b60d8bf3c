"""The loss curve: what is read, how it is smoothed, and that the picture shows it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.monitor.plots import plot_losses, plot_metrics, read_curves, read_quantities, smooth

from .conftest import LogRecords


def metrics(path: Path, records: list[dict[str, Any]]) -> Path:
    writer = MetricsWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def falling(steps: int, every: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 2.0 + 3.0 * math.exp(-step / 20) + 0.1 * math.sin(step * 7)}
        for step in range(every, steps + 1, every)
    ]


def pixels(path: Path) -> np.ndarray[Any, Any]:
    from matplotlib import image

    return np.asarray(image.imread(path))[:, :, :3]


def count(picture: np.ndarray[Any, Any], colour: str) -> int:
    """Number of pixels that have about this colour."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(picture - rgb).max(axis=2) < 0.06).sum())


BLUE, ORANGE, GREEN, GREY, RED = "#2563a8", "#d95f0e", "#1b7f5c", "#5f6670", "#c0182b"


def test_curves_are_read_from_the_records() -> None:
    records = [
        {"step": 1, "loss": 3.0, "grad_norm": 9.0},
        {"step": 2, "eval_loss": 2.9, "eval_runtime": 1.0},
        {"step": 2, "eval_books_loss": 2.8},
        {"step": 3, "loss": None, "loss_nonfinite": "nan"},
        {"step": 4, "train_loss": 1.0, "my_loss": 1.0, "loss_scale": 8.0},
        {"loss": 1.0},
    ]
    train, evaluations, broken = read_curves(records)
    assert (train.steps, train.losses) == ([1], [3.0])
    assert {label: (curve.steps, curve.losses) for label, curve in evaluations.items()} == {
        "evaluation": ([2], [2.9]),
        "evaluation (books)": ([2], [2.8]),
    }
    assert broken == [3]


def test_a_loss_of_another_kind_is_not_drawn_with_those_of_evaluations(tmp_path: Path) -> None:
    records = [{"step": step, "distillation_loss": 0.7, "eval_loss": 7.0} for step in (1, 2, 3)]
    train, evaluations, _ = read_curves(records)
    assert train.losses == [0.7] * 3 and evaluations == {}
    assert list(read_quantities(records)) == ["eval_loss"], "it has a panel of its own"
    target = tmp_path / "loss.png"
    assert plot_losses(metrics(tmp_path / "m.jsonl", records), target) is True
    assert count(pixels(target), BLUE) > 300 and count(pixels(target), ORANGE) == 0


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
    source, target = metrics(tmp_path / "metrics.jsonl", records), tmp_path / "plots" / "loss.png"
    assert plot_losses(source, target, {"gzip -9": 3.5}) is True
    picture = pixels(target)
    assert picture.shape[0] >= 600 and picture.shape[1] >= 1000
    assert count(picture, BLUE) > 500
    assert count(picture, ORANGE) > 500
    assert count(picture, GREEN) == count(picture, RED) == 0
    assert [entry.name for entry in target.parent.iterdir()] == ["loss.png"]
    assert plot_losses(source, target) is True
    assert count(picture, GREY) > count(pixels(target), GREY) + 500  # dashes and label of the baseline


def test_panels_without_data_are_not_drawn(tmp_path: Path) -> None:
    source, target = metrics(tmp_path / "m.jsonl", falling(10)), tmp_path / "loss.png"
    assert plot_losses(source, target) is True
    picture = pixels(target)
    assert count(picture, BLUE) > 500
    assert count(picture, ORANGE) == count(picture, RED) == 0


def test_a_second_evaluation_set_has_its_own_color(tmp_path: Path) -> None:
    records = [{"step": step, "eval_a_loss": 2.0, "eval_b_loss": 3.0} for step in (1, 2, 3)]
    target = tmp_path / "loss.png"
    assert plot_losses(metrics(tmp_path / "m.jsonl", records), target) is True
    assert count(pixels(target), ORANGE) > 300 and count(pixels(target), GREEN) > 300


def test_single_points_and_non_finite_steps_are_visible(tmp_path: Path) -> None:
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}]
    target = tmp_path / "loss.png"
    assert plot_losses(metrics(tmp_path / "m.jsonl", records), target) is True
    assert count(pixels(target), BLUE) > 50 and count(pixels(target), RED) > 20


def test_more_evaluation_sets_than_colors_and_a_spike(tmp_path: Path) -> None:
    spike = {"step": 30, "loss": 1e6}
    records = [*falling(60), {"step": 5, **{f"eval_{name}_loss": 2.0 for name in "abcdef"}}, spike]
    assert plot_losses(metrics(tmp_path / "m.jsonl", records), tmp_path / "loss.png") is True


def test_an_older_plot_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "loss.png"
    target.write_bytes(b"old")
    assert plot_losses(metrics(tmp_path / "m.jsonl", falling(5)), target) is True
    assert target.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path, log: LogRecords) -> None:
    source = metrics(tmp_path / "m.jsonl", [{"step": 1, "grad_norm": 1.0}])
    assert plot_losses(source, tmp_path / "loss.png") is False
    assert plot_losses(tmp_path / "missing.jsonl", tmp_path / "loss.png") is False
    assert not (tmp_path / "loss.png").exists()
    assert log.text.count("has no loss") == 2


def test_without_matplotlib_a_message_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: LogRecords
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import finds where it is not installed
    source = metrics(tmp_path / "m.jsonl", falling(5))
    assert plot_losses(source, tmp_path / "loss.png") is False
    assert log.messages == ["INFO loss.png was not drawn: matplotlib is not installed (pip install 'ds-trainer[plot]')"]
    assert not (tmp_path / "loss.png").exists()


def test_the_backend_and_figures_of_the_user_are_kept(tmp_path: Path) -> None:
    import matplotlib

    before = matplotlib.get_backend(auto_select=False)
    plot_losses(metrics(tmp_path / "m.jsonl", falling(5)), tmp_path / "loss.png")
    assert matplotlib.get_backend(auto_select=False) == before


def test_everything_but_losses_has_a_panel(tmp_path: Path) -> None:
    records = [
        {"step": 1, "epoch": 0.1, "time": 1.0, "loss": 3.0, "learning_rate": 0.1, "grad_norm": None},
        {"step": 2, "epoch": 0.2, "time": 2.0, "loss": 2.0, "learning_rate": 0.2, "grad_norm": 4, "flag": True},
        {
            "step": 2,
            "eval_loss": 2.0,
            "eval_accuracy": 0.5,
            "eval_runtime": 1.0,
            "eval_samples_per_second": 3.0,
            "eval_items": 9,
            "eval_part_items": 9,
        },
        {"step": 2, "train_loss": 2.5, "train_runtime": 9.0, "total_flos": 1e9, "name": "text"},
    ]
    found = read_quantities(records)
    assert {name: (curve.steps, curve.losses) for name, curve in found.items()} == {
        "learning_rate": ([1, 2], [0.1, 0.2]),
        "grad_norm": ([2], [4]),
        "eval_accuracy": ([2], [0.5]),
    }
    source, target = metrics(tmp_path / "m.jsonl", records), tmp_path / "metrics.png"
    assert plot_metrics(source, target)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert not plot_metrics(metrics(tmp_path / "empty.jsonl", [{"step": 1, "loss": 1.0}]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()

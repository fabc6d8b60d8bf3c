"""The metrics file as images: the loss, and everything else. Drawn from the file alone, at any time of a run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ds_trainer.monitor.metrics_file import LOSSES, read_records
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = get_logger("monitor.plots")

# Blue and orange are distinct for color-blind readers and in grayscale; the others are for more evaluation sets.
_TRAIN_COLOR = "#2563a8"
_EVAL_COLORS = ("#d95f0e", "#1b7f5c", "#8e4fb0", "#b0892a")
_BASELINE_COLOR = "#5f6670"
_TEXT_COLOR = "#2b2f36"

_SMOOTH_FROM = 40  # with fewer points, the raw line is clearer than an average of it
_POSITION = ("step", "epoch", "time")
_NO_QUANTITY = re.compile(
    r"train_.*|total_flos|.*_nonfinite|eval_(\w+_)?(runtime|\w+_per_second|items|model_preparation_time)"
)
_EVAL_LOSS = re.compile(r"eval(?:_(?P<set>\w+))?_loss")


@dataclass
class Curve:
    """One loss over optimizer steps."""

    steps: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def read_curves(records: Sequence[Mapping[str, Any]]) -> tuple[Curve, dict[str, Curve], list[float]]:
    """The training loss, each evaluation loss of the same kind by name, and the steps with a non-finite loss."""
    train = Curve()
    evaluations: dict[str, Curve] = {}
    broken: list[float] = []
    for record in records:
        step = record.get("step")
        if not isinstance(step, (int, float)):
            continue
        for name, value in record.items():
            found = _EVAL_LOSS.fullmatch(name)
            if name not in LOSSES and found is None:
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                broken.append(step)
                continue
            if found is None:
                curve = train
            else:
                label = f"evaluation ({found['set']})" if found["set"] else "evaluation"
                curve = evaluations.setdefault(label, Curve())
            curve.steps.append(step)
            curve.losses.append(value)
    return train, {} if loss_name(records) != "loss" else evaluations, broken


def loss_name(records: Sequence[Mapping[str, Any]]) -> str:
    """What the training loss is called: ``loss``, or the name of one that is not the loss of an evaluation."""
    other = (name for record in records for name in LOSSES[1:] if name in record)
    return next(other, LOSSES[0])


def smooth(values: Sequence[float], half: int) -> list[float]:
    """The trend of ``values``: at each one the median, then the mean, of it and up to ``half`` neighbors on each side.

    The median removes single spikes. The window is centered and shrinks toward the ends, so that the trend of a falling
    loss does not lag above it, as a running average would.
    """
    trend = list(values)
    for middle in (median, fmean):
        last = len(trend) - 1
        reaches = [min(half, index, last - index) for index in range(len(trend))]
        trend = [middle(trend[index - reach : index + reach + 1]) for index, reach in enumerate(reaches)]
    return trend


def plot_losses(
    metrics_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    baselines: Mapping[str, float] | None = None,
) -> bool:
    """Draw the training and evaluation losses of ``metrics_path`` to ``png_path``. Returns whether it was written.

    ``baselines`` are losses to compare with (name to value, in the unit of the curve), drawn as horizontal lines.
    Nothing is written if matplotlib is not installed or no loss was recorded; a log line gives the reason.
    """
    records = read_records(metrics_path)
    train, evaluations, broken = read_curves(records)
    if not train.steps and not evaluations:
        logger.info(
            "%s was not drawn: %s has no loss; a smaller logging_steps records one", Path(png_path).name, metrics_path
        )
        return False
    figure = new_figure(Path(png_path).name, (8.0, 4.6))
    if figure is None:
        return False
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    _draw_train(axes, train)
    for index, (label, curve) in enumerate(evaluations.items()):
        _draw_evaluation(axes, label, curve, _EVAL_COLORS[index % len(_EVAL_COLORS)])
    for label, value in (baselines or {}).items():
        _draw_baseline(axes, label, value)
    if broken:
        axes.plot(
            broken, [0.02] * len(broken), "x", color="#c0182b", markersize=6, label="not finite",
            transform=axes.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    losses = [*train.losses, *(loss for curve in evaluations.values() for loss in curve.losses)]
    _dress(axes, losses, loss_name(records).replace("_", " "))

    save_figure(figure, Path(png_path))
    return True


def read_quantities(records: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Every number that is logged during a training and not drawn with the loss, by name, in the order of the records.

    Durations and speeds of evaluations and the summary of the training (``train_...``) are left out.
    """
    found: dict[str, Curve] = {}
    own = loss_name(records)
    for record in records:
        step = record.get("step")
        for name, value in record.items():
            with_loss = name == own or (own == "loss" and _EVAL_LOSS.fullmatch(name))
            if name in _POSITION or with_loss or _NO_QUANTITY.fullmatch(name):
                continue
            if "loss/" in name:  # of a source of a mixture; the report has these
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(step, (int, float)):
                continue
            curve = found.setdefault(name, Curve())
            curve.steps.append(step)
            curve.losses.append(value)
    return found


def plot_metrics(metrics_path: str | os.PathLike[str], png_path: str | os.PathLike[str]) -> bool:
    """Draw everything but losses, each in a panel, to ``png_path``. Returns whether it was written.

    Nothing is written if matplotlib is not installed or nothing was recorded.
    """
    quantities = read_quantities(read_records(metrics_path))
    if not quantities:
        return False
    columns = min(3, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    figure = new_figure(Path(png_path).name, (4.0 * columns, 2.5 * rows))
    if figure is None:
        return False
    for index, (name, curve) in enumerate(quantities.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        color = _EVAL_COLORS[0] if name.startswith("eval_") else _TRAIN_COLOR
        marker = "o" if len(curve.steps) < 3 or name.startswith("eval_") else None
        axes.plot(curve.steps, curve.losses, color=color, linewidth=1.3, marker=marker, markersize=3)
        axes.set_title(name.replace("_", " "), fontsize=9, color=_TEXT_COLOR)
        _plain_axes(axes)
    save_figure(figure, Path(png_path))
    return True


def new_figure(name: str, size: tuple[float, float]) -> Figure | None:
    """A figure of ``size`` inches; None without matplotlib. Without pyplot, which would change the user's figures."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("%s was not drawn: matplotlib is not installed (pip install 'ds-trainer[plot]')", name)
        return None
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, target: Path) -> None:
    """Write a PNG, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _draw_train(axes: Axes, curve: Curve) -> None:
    if not curve.steps:
        return
    if len(curve.steps) < _SMOOTH_FROM:
        marker = "o" if len(curve.steps) < 3 else None  # a line through one point cannot be seen
        axes.plot(curve.steps, curve.losses, color=_TRAIN_COLOR, linewidth=1.8, marker=marker, label="training")
        return
    axes.plot(curve.steps, curve.losses, color=_TRAIN_COLOR, linewidth=0.8, alpha=0.28)
    half = min(25, max(2, len(curve.losses) // 50))
    axes.plot(curve.steps, smooth(curve.losses, half), color=_TRAIN_COLOR, linewidth=1.9, label="training (smoothed)")


def _draw_evaluation(axes: Axes, label: str, curve: Curve, color: str) -> None:
    axes.plot(
        curve.steps,
        curve.losses,
        color=color,
        linewidth=1.3,
        marker="o",
        markersize=5 if len(curve.steps) <= _SMOOTH_FROM else 3,
        markeredgecolor="white",
        markeredgewidth=0.8,
        label=label,
        zorder=4,
    )
    axes.annotate(
        f"{curve.losses[-1]:.3f}",
        (curve.steps[-1], curve.losses[-1]),
        xytext=(5, 5),
        textcoords="offset points",
        color=color,
        fontsize=9,
    )


def _draw_baseline(axes: Axes, label: str, value: float) -> None:
    axes.axhline(value, color=_BASELINE_COLOR, linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
    axes.annotate(
        f"{label}  {value:.3f}",
        (0.01, value),  # on the left: a falling loss leaves that corner empty
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        color=_BASELINE_COLOR,
        fontsize=9,
    )


def _dress(axes: Axes, losses: Sequence[float], name: str) -> None:
    """Labels, grid, legend; a log scale if a large outlier would flatten the rest of the curve."""
    if min(losses) > 0 and max(losses) > 10 * median(losses):
        axes.set_yscale("log")
    axes.set_xlabel("optimizer step", color=_TEXT_COLOR)
    axes.set_ylabel(name, color=_TEXT_COLOR)
    _plain_axes(axes)
    axes.margins(x=0.02, y=0.08)
    axes.legend(frameon=False, fontsize=9, labelcolor=_TEXT_COLOR)


def _plain_axes(axes: Axes) -> None:
    axes.grid(True, color="#d9dde3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT_COLOR, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa1ab")

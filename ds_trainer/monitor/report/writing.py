"""Writes ``report.html`` and ``report.json``, and the charts of a report as files of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_trainer.monitor.metrics_file import LOSSES, without_nonfinite
from ds_trainer.monitor.report.charts import chart_file
from ds_trainer.monitor.report.comparison import comparison_of, comparison_page
from ds_trainer.monitor.report.contents import read_report
from ds_trainer.monitor.report.figures import loss_charts, quantity_chart
from ds_trainer.monitor.report.page import report_page
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.output_files import write_output
from ds_trainer.utils.printable import printable

PAGE_NAME, CONTENT_NAME = "report.html", "report.json"
COMPARISON_NAME = "comparison"
LOSS_PLOT, METRICS_PLOT = "loss.svg", "metrics.svg"


def write_report(directory: Path, device_hour_price: float | None = None) -> Path:
    """Write the report of the run in ``directory`` from its files, also if the run has not ended. Returns the page.

    Raises:
        ConfigError: it is not the output directory of a run.
        OSError: a file cannot be written.
    """
    report = read_report(directory, device_hour_price)
    _write_json(directory / CONTENT_NAME, report)
    _write(directory / PAGE_NAME, printable(report_page(report)))
    return directory / PAGE_NAME


def write_plots(directory: Path, baselines: Mapping[str, float] | None = None) -> list[Path]:
    """Draw the run in ``directory``, also if it has not ended: losses to ``loss.svg``, the rest to ``metrics.svg``.

    Args:
        directory: output directory of a run.
        baselines: losses to compare with, by name: horizontal lines.

    Returns:
        The files that were written; none for what was not logged.

    Raises:
        ConfigError: it is not the output directory of a run.
        OSError: a file cannot be written.
    """
    report, written = read_report(directory), []
    others = [
        quantity_chart(name, points, report["spikes"])
        for name, points in report["curves"].items()
        if name not in LOSSES and len(points) > 1
    ]
    losses = loss_charts(report, levels=list((baselines or {}).items()))
    for name, text in ((LOSS_PLOT, chart_file(losses)), (METRICS_PLOT, chart_file(others, columns=3))):
        if text:
            _write(directory / name, printable(text))
            written.append(directory / name)
    return written


def write_comparison(first: Path, second: Path, target: Path, device_hour_price: float | None = None) -> Path:
    """Write the comparison of two runs to ``target`` (a page, with a ``.json`` beside it). Returns the page.

    Raises:
        ConfigError: one of them is not the output directory of a run.
        OSError: a file cannot be written.
    """
    comparison = comparison_of(read_report(first, device_hour_price), read_report(second, device_hour_price))
    _write_json(target.with_suffix(".json"), comparison, write_text_atomic)
    _write(target, printable(comparison_page(comparison)), write_text_atomic)
    return target


def _write_json(path: Path, content: dict[str, Any], write: Callable[[Path, str], None] = write_output) -> None:
    plain = without_nonfinite(content)
    _write(path, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n", write)


def _write(path: Path, text: str, write: Callable[[Path, str], None] = write_output) -> None:
    """Write ``text``; half of a surrogate pair, from a file name or from data, becomes a question mark."""
    write(path, text.encode("utf-8", errors="replace").decode("utf-8"))

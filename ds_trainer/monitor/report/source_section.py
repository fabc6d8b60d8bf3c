"""The section of a report about the sources of a mixture: the loss of each, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.monitor.report.charts import SERIES, Chart, Series, draw
from ds_trainer.monitor.report.html import section, shown, table

_MOST_ROWS = 100


def source_section(losses: Mapping[str, Mapping[str, Any]]) -> str:
    """The section; empty without losses.

    Args:
        losses: curves by source, by the name of the loss (``loss``, ``eval_loss``).
    """
    if not losses:
        return ""
    names = list(dict.fromkeys(name for found in losses.values() for name in found))
    charts = [_chart(loss, found) for loss, found in losses.items()]
    heads = ["source", *(f"{shown(loss)}: {what}" for loss in losses for what in ("first", "lowest", "last"))]
    rows = [[name, *(text for found in losses.values() for text in _values(found.get(name)))] for name in names]
    more = "" if len(names) <= _MOST_ROWS else f'<p class="soft small">{len(names) - _MOST_ROWS:,} more sources.</p>'
    body = f'<div class="charts">{"".join(charts)}</div>{table(heads, rows[:_MOST_ROWS])}{more}'
    return section("Loss of each source", body)


def _chart(loss: str, found: Mapping[str, Any]) -> str:
    """The curves of as many sources as there are colors, those with the highest last loss."""
    names = sorted(found, key=lambda name: -found[name][-1][1])[:SERIES]
    series = [Series(name, found[name], n, dots=len(found[name]) < 2) for n, name in enumerate(names)]
    title = shown(loss) if len(found) <= SERIES else f"{shown(loss)}, the {SERIES} highest of {len(found)} sources"
    return draw(Chart(title, series))


def _values(points: Any) -> list[str]:
    if not points:
        return ["", "", ""]
    values = [value for _, value in points]
    return [f"{value:.4g}" for value in (values[0], min(values), values[-1])]

"""Two runs side by side: figures, curves in one chart, arguments that differ."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from ds_trainer.monitor.metrics_file import LOSSES
from ds_trainer.monitor.report.charts import Chart, Series, draw, smoothed
from ds_trainer.monitor.report.figures import format_of
from ds_trainer.monitor.report.html import section, shown, table
from ds_trainer.monitor.report.page import cost_texts, html_page, quality_texts, speed_texts, state_name
from ds_trainer.utils.units import human_duration


def comparison_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What two reports (:func:`ds_trainer.monitor.report.contents.report_of`) have in common, and where they differ."""
    names = [first["name"], second["name"]]
    if names[0] == names[1]:
        names = [first["directory"], second["directory"]]
    return {
        "names": names,
        "summaries": [first["summary"], second["summary"]],
        "arguments": _differing_arguments(first, second),
        "versions": _differing(first["versions"], second["versions"]),
        "git": [first["git"], second["git"]],
        "times": [first["time"], second["time"]],
        "curves": {
            name: [first["curves"].get(name, []), second["curves"].get(name, [])]
            for name in dict.fromkeys([*first["curves"], *second["curves"]])
        },
        "evaluations": {
            name: [first["evaluations"].get(name, []), second["evaluations"].get(name, [])]
            for name in dict.fromkeys([*first["evaluations"], *second["evaluations"]])
        },
    }


def _differing_arguments(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments with different values; one that a run did not change has its default."""
    rows = [{one["name"]: one for one in report["arguments"]} for report in (first, second)]
    arguments = []
    for name in sorted(rows[0].keys() | rows[1].keys()):
        other = rows[0].get(name) or rows[1][name]
        values = [row[name]["value"] if name in row else other["default"] for row in rows]
        origins = [row[name]["origin"] if name in row else "default" for row in rows]
        if values[0] != values[1]:
            arguments.append({"name": name, "values": values, "origins": origins})
    return arguments


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [first.get(name), second.get(name)]
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    }


def comparison_page(comparison: Mapping[str, Any]) -> str:
    """The page of a comparison."""
    names = comparison["names"]
    body = [
        f"<h1>{escape(names[0])} and {escape(names[1])}</h1>",
        section("Figures", table(("", *names), _figures(comparison))),
        section("Curves", f'<div class="charts">{"".join(_charts(comparison))}</div>'),
        section("Where the time went", table(("", *names), _times(comparison["times"]))),
        section("What differs", _differences(comparison)),
    ]
    return html_page(f"{names[0]} and {names[1]}: two trainings", body)


def _figures(comparison: Mapping[str, Any]) -> list[tuple[str, ...]]:
    left, right = comparison["summaries"]
    rows: list[tuple[str, ...]] = [
        ("outcome", *(f"{state_name(one['outcome']['state'])}. {one['outcome']['text']}" for one in (left, right)))
    ]
    for title, part, texts in (
        ("how good", "quality", quality_texts),
        ("how fast", "speed", speed_texts),
        ("cost", "cost", cost_texts),
    ):
        figures = [texts(one[part]) for one in (left, right)]
        rows.append((title, *(big for big, _ in figures)))
        rows += [("", *pair) for pair in _pairs(figures[0][1], figures[1][1])]
    return rows


def _pairs(left: list[str], right: list[str]) -> list[tuple[str, str]]:
    size = max(len(left), len(right))
    return list(zip(left + [""] * (size - len(left)), right + [""] * (size - len(right)), strict=True))


def _charts(comparison: Mapping[str, Any]) -> list[str]:
    names, charts = comparison["names"], []
    for group in ("evaluations", "curves"):
        for name, pair in comparison[group].items():
            series = []
            for color, (label, points) in enumerate(zip(names, pair, strict=True)):
                if points:
                    trend = smoothed(points) if name in LOSSES else None
                    series.append(Series(label, trend or points, color, dots=group == "evaluations"))
            charts.append(draw(Chart(shown(name), series, format_of(name))))
    return charts


def _times(times: Any) -> list[tuple[str, ...]]:
    parts = [{part["name"]: part for part in time["parts"]} for time in times]
    rows: list[tuple[str, ...]] = [("total", *(human_duration(time["total_seconds"]) for time in times))]
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        seconds = (part.get(name) for part in parts)
        rows.append(
            (name, *("" if one is None else f"{human_duration(one['seconds'])}, {one['share']:.1%}" for one in seconds))
        )
    return rows


def _differences(comparison: Mapping[str, Any]) -> str:
    names = comparison["names"]
    rows = [
        (row["name"], *(f"{value} ({origin})" for value, origin in zip(row["values"], row["origins"], strict=True)))
        for row in comparison["arguments"]
    ]
    rows += [(name, *(str(value or "") for value in pair)) for name, pair in comparison["versions"].items()]
    commits = [
        git["commit"][:12] + (", changed files" if git["changed_files"] else "") if git else ""
        for git in comparison["git"]
    ]
    if commits[0] != commits[1]:
        rows.append(("git", *commits))
    return table(("", *names), rows) if rows else '<p class="soft">Neither arguments nor versions differ.</p>'

"""Charts as inline SVG: lines, bars of shares, histograms. Colors are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from statistics import median

from ds_trainer.monitor.plots import smooth

Points = Sequence[Sequence[float]]

_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 12, 24
_TICK_STEPS = (1, 2, 2.5, 5, 10)
_SMOOTH_FROM = 60
_LARGEST = 1e150
SERIES = 6
"""Number of series colors."""


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        label: for the legend.
        points: ``(x, y)``, finite, by x.
        color: index of its color.
        dots: mark every point.
        faint: draw it thin and pale.
    """

    label: str
    points: Points
    color: int = 0
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A line chart.

    Attributes:
        title: above it; also what screen readers say.
        series: the lines.
        format: text of a value on the vertical axis.
        levels: horizontal lines, ``(label, y)``.
        marks: marked places, ``(x, y, tooltip)``; y None is at the bottom: a value that is not finite.
        wide: twice as wide.
        from_zero: include 0.
    """

    title: str
    series: Sequence[Series]
    format: Callable[[float], str] = lambda value: f"{value:.4g}"
    levels: Sequence[tuple[str, float]] = ()
    marks: Sequence[tuple[float, float | None, str]] = field(default=())
    wide: bool = False
    from_zero: bool = False


def smoothed(points: Points) -> list[list[float]] | None:
    """The trend of a long, noisy line; None for a short one."""
    if len(points) < _SMOOTH_FROM:
        return None
    half = min(25, max(2, len(points) // 50))
    values = smooth([y for _, y in points], half)
    return [[point[0], value] for point, value in zip(points, values, strict=True)]


def draw(chart: Chart) -> str:
    """The chart with its title and legend; empty without points."""
    chart = replace(chart, series=[_drawable(series) for series in chart.series])
    points = [point for series in chart.series for point in series.points]
    if not points:
        return ""
    width, height = (760, 300) if chart.wide else (380, 210)
    axes = _Axes.of(chart, points, width, height)
    parts = [*axes.lines(chart.format), *(axes.level(label, y) for label, y in chart.levels)]
    parts += [axes.line(series) for series in chart.series]
    parts += [axes.mark(*mark) for mark in chart.marks]
    legend = ""
    named = [series for series in chart.series if series.label]
    if len(named) > 1:
        keys = (
            f'<span class="key k{s.color % SERIES}{" pale" if s.faint else ""}">{escape(s.label)}</span>' for s in named
        )
        legend = f'<div class="legend">{"".join(keys)}</div>'
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg}{legend}</figure>"


def _drawable(series: Series) -> Series:
    """Without values whose differences overflow: of a diverged run."""
    return replace(series, points=[point for point in series.points if abs(point[1]) < _LARGEST])


@dataclass(frozen=True)
class _Axes:
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool

    @classmethod
    def of(cls, chart: Chart, points: Points, width: float, height: float) -> _Axes:
        xs = [x for x, _ in points]
        ys = [y for _, y in points] + [y for _, y in chart.levels]
        low, high = min(ys), max(ys)
        log = low > 0 and high > 20 * median(y for _, y in points) and not chart.from_zero
        if chart.from_zero:
            low = min(0.0, low)
        if low == high:
            low, high = (low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9) if not log else (low / 2, high * 2)
        x_low, x_high = min(xs), max(xs)
        if x_low == x_high:
            x_low, x_high = x_low - 1, x_high + 1
        room = 0.0 if log else 0.05 * (high - low)
        bottom = low if chart.from_zero else low - room
        return cls(width, height, (x_low, x_high), (bottom, high + room), log)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def lines(self, form: Callable[[float], str]) -> list[str]:
        """Grid and labels."""
        parts = []
        ticks = log_ticks(*self.y_range) if self.log else nice_ticks(*self.y_range, most=5)
        for value in ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{self.width - _RIGHT}"/>')
            parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(form(value))}</text>')
        for value in nice_ticks(*self.x_range, most=7 if self.width > 500 else 4):
            if value == int(value):
                x = self.x(value)
                parts.append(f'<text class="tick mid" x="{x:.1f}" y="{self.height - 6}">{value:,.0f}</text>')
        parts.append(f'<path class="axis" d="M{_LEFT} {self.height - _BOTTOM}H{self.width - _RIGHT}"/>')
        return parts

    def line(self, series: Series) -> str:
        places = [(self.x(x), self.y(y)) for x, y in series.points]
        color = f"c{series.color % SERIES}{' faint' if series.faint else ''}"
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        text = f'<path class="line {color}" d="{path}"/>' if len(places) > 1 else ""
        if series.dots or len(places) < 3:
            text += "".join(f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places)
        return text

    def level(self, label: str, value: float) -> str:
        y = self.y(value)
        return (
            f'<path class="level" d="M{_LEFT} {y:.1f}H{self.width - _RIGHT}"/>'
            f'<text class="tick end" x="{self.width - _RIGHT}" y="{y - 4:.1f}">{escape(label)}</text>'
        )

    def mark(self, x: float, y: float | None, tip: str) -> str:
        if not self.x_range[0] <= x <= self.x_range[1]:
            return ""
        place, height = self.x(x), self.height - _BOTTOM if y is None else self.y(min(y, self.y_range[1]))
        shape = (
            f'<path class="broken" d="M{place - 4:.1f} {height - 10:.1f}l8 8m0-8l-8 8"/>'
            if y is None
            else f'<circle class="spike" cx="{place:.1f}" cy="{height:.1f}" r="5"/>'
        )
        return f"<g>{shape}<title>{escape(tip)}</title></g>"


def _key(label: str, color: int, pale: bool) -> str:
    return f'<span class="key k{color}{" pale" if pale else ""}">{escape(label)}</span>'


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` round numbers between ``low`` and ``high``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next((factor * power for factor in _TICK_STEPS if factor * power * most >= span), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return [(first + index) * step for index in range(count + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between ``low`` and ``high``; 1, 2 and 5 times them if there are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(found) >= 3:
        return found
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]


def shares(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of shares (0 to 1), with a table of label, share and text below."""
    segments, rows, left = [], [], 0.0
    for number, (label, share, text) in enumerate(parts):
        color, width = number % SERIES, 100 * share
        tip = f"<title>{escape(label)} {100 * share:.1f} %</title>"
        segments.append(f'<rect class="f{color}{" hatched" if number >= SERIES else ""}" x="{left:.2f}" y="0" '
                        f'width="{width:.2f}" height="10">{tip}</rect>')  # fmt: skip
        left += width
        key = _key(label, color, number >= SERIES)
        rows.append(f'<tr><td>{key}</td><td class="n">{100 * share:.1f} %</td><td class="n">{escape(text)}</td></tr>')
    options = 'class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="shares"'
    bar = f"<svg {options}>{''.join(segments)}</svg>"
    return f'{bar}<table class="plain">{"".join(rows)}</table>'


def histogram(title: str, edges: Sequence[float], counts: Sequence[float]) -> str:
    """Bars for ``counts`` between ``edges`` (one more than counts)."""
    top = max(counts, default=0)
    if top <= 0 or len(edges) != len(counts) + 1:
        return ""
    width, height = 380.0, 170.0
    step = (width - _LEFT - _RIGHT) / len(counts)
    parts = []
    for number, count in enumerate(counts):
        tall = count / top * (height - _TOP - _BOTTOM)
        tip = f"{edges[number]:,.0f} to {edges[number + 1]:,.0f}: {count:,.0f}"
        parts.append(f'<rect class="f0" x="{_LEFT + number * step:.1f}" y="{height - _BOTTOM - tall:.1f}" '
                     f'width="{max(1.0, step - 1):.1f}" height="{tall:.1f}"><title>{tip}</title></rect>')  # fmt: skip
    every = -(-len(edges) // 7)  # bars may be of different widths: their edges are labeled
    for number in range(0, len(edges), every):
        x = _LEFT + number * step
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{height - 6}">{edges[number]:,.0f}</text>')
    parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{_TOP + 8}">{top:,.0f}</text>')
    svg = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"

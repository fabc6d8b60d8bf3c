"""Charts as SVG: lines, bars of shares, histograms, stacked bars; in a page or as files of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from statistics import fmean, median

Points = Sequence[Sequence[float]]

_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 12, 24
_TICK_STEPS = (1, 2, 2.5, 5, 10)
_SMOOTH_FROM = 60
_LARGEST = 1e150
SERIES = 6
"""Number of series colors."""

LIGHT = (
    "--page:#f6f7f9;--card:#fff;--text:#1c2128;--soft:#57606a;--line:#d9dee5;--good:#1a7f37;--bad:#b3261e;"
    "--warn:#8a5a00;--trained:#d7f0dc;--masked:#eceff3;"
    "--c0:#2563a8;--c1:#c2500b;--c2:#1b7f5c;--c3:#8447a8;--c4:#9a7416;--c5:#5f6670;"
)
DARK = (
    "--page:#0f1318;--card:#181d24;--text:#e6eaf0;--soft:#9aa5b3;--line:#2c343f;--good:#56c271;--bad:#ff8078;"
    "--warn:#e3b341;--trained:#17402a;--masked:#262d37;"
    "--c0:#6ea8ef;--c1:#f0944d;--c2:#4cc59b;--c3:#c390e8;--c4:#d9b44a;--c5:#9aa5b3;"
)
CHART_STYLE = (
    ".line{fill:none;stroke-width:1.8;stroke-linejoin:round}.faint{opacity:.35;stroke-width:1}"
    ".grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}"
    ".level{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}"
    ".tick{fill:var(--soft);font-size:11px}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".spike{fill:none;stroke:var(--bad);stroke-width:2}.broken{stroke:var(--bad);stroke-width:2.5;fill:none}"
    ".hatched{opacity:.4}"
) + "".join(f".c{n}{{stroke:var(--c{n})}}.dot.c{n},.f{n}{{fill:var(--c{n})}}" for n in range(SERIES))
_FILE_STYLE = (
    f":root{{{LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    'text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif}.back{fill:var(--card)}'
    f".title{{fill:var(--text);font-size:13px;font-weight:600}}{CHART_STYLE}"
)


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


def draw(chart: Chart) -> str:
    """The chart with its title and legend for a page; empty without points."""
    parts = _parts(chart)
    if not parts:
        return ""
    width, height = _size(chart)
    named = _named(chart)
    keys = "".join(
        f'<span class="key k{s.color % SERIES}{" pale" if s.faint else ""}">{escape(s.label)}</span>' for s in named
    )
    legend = f'<div class="legend">{keys}</div>' if named else ""
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg}{legend}</figure>"


def chart_file(charts: Sequence[Chart], columns: int = 1) -> str:
    """The charts as an SVG document, ``columns`` in a row; empty without points."""
    drawn = [(chart, parts) for chart in charts if (parts := _parts(chart))]
    if not drawn:
        return ""
    width, height = _size(drawn[0][0])
    tall, body = height + 44, []
    for number, (chart, parts) in enumerate(drawn):
        row, column = divmod(number, columns)
        legend, left = [], _LEFT
        for series in _named(chart):
            shade = " hatched" if series.faint else ""
            legend.append(f'<rect class="f{series.color % SERIES}{shade}" x="{left}" y="28" width="9" height="9"/>'
                          f'<text class="tick" x="{left + 13}" y="37">{escape(series.label)}</text>')  # fmt: skip
            left += 24 + 6 * len(series.label)
        body.append(
            f'<g transform="translate({column * width} {row * tall})">'
            f'<text class="title" x="{_LEFT}" y="20">{escape(chart.title)}</text>{"".join(legend)}'
            f'<g transform="translate(0 40)">{"".join(parts)}</g></g>'
        )
    return _document(width * min(columns, len(drawn)), tall * -(-len(drawn) // columns), body)


def _document(width: float, height: float, body: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    back = f'<rect class="back" width="{width:g}" height="{height:g}"/>'
    style = f"<style>{_FILE_STYLE}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{back}{"".join(body)}</svg>\n'


def _size(chart: Chart) -> tuple[int, int]:
    return (760, 300) if chart.wide else (380, 210)


def _named(chart: Chart) -> list[Series]:
    """The lines of the legend; none if there is only one line."""
    named = [series for series in chart.series if series.label]
    return named if len(named) > 1 else []


def _parts(chart: Chart) -> list[str]:
    """What is drawn; empty without points."""
    # Values whose differences overflow, of a diverged run, cannot be drawn.
    drawn = [replace(one, points=[point for point in one.points if abs(point[1]) < _LARGEST]) for one in chart.series]
    chart = replace(chart, series=drawn)
    points = [point for series in chart.series for point in series.points]
    if not points:
        return []
    axes = _Axes.of(chart, points, *_size(chart))
    parts = [*axes.lines(chart.format), *(axes.level(label, y) for label, y in chart.levels)]
    parts += [axes.line(series) for series in chart.series]
    return parts + [axes.mark(*mark) for mark in chart.marks]


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
    ticks = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(ticks) >= 3:
        return ticks
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


def stacked_file(title: str, bars: Mapping[str, Mapping[str, float]], limit: float, unit: str) -> str:
    """Horizontal bars, each made of parts, as an SVG document, with a line at ``limit``.

    Args:
        title: above the bars.
        bars: sizes by part, for each bar from top to bottom.
        limit: drawn as a line.
        unit: what the sizes are measured in.
    """
    largest: dict[str, float] = {}
    for parts in bars.values():
        for name, size in parts.items():
            largest[name] = max(largest.get(name, 0.0), size)
    names = sorted(largest, key=lambda name: -largest[name])
    longest = max(limit, *(sum(parts.values()) for parts in bars.values()))
    left, wide, row = 12 + 6.5 * max(map(len, bars)), 460.0, 26
    bottom, body = 40 + row * len(bars), [f'<text class="title" x="12" y="22">{escape(title)}</text>']
    for number, (label, parts) in enumerate(bars.items()):
        x, y = left, 36 + row * number
        body.append(f'<text class="tick end" x="{left - 6:.1f}" y="{y + 14}">{escape(label)}</text>')
        for place, name in enumerate(names):
            if size := parts.get(name, 0.0):
                width = wide * size / longest
                body.append(f'<rect class="f{place % SERIES}{" hatched" if place // SERIES % 2 else ""}" x="{x:.1f}" '
                            f'y="{y}" width="{width:.1f}" height="{row - 6}">'
                            f"<title>{escape(name)}: {size:.2f} {escape(unit)}</title></rect>")  # fmt: skip
                x += width
    for value in nice_ticks(0.0, longest, most=6):
        x = left + wide * value / longest
        body.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 14}">{value:g}</text>')
    at = left + wide * limit / longest
    body.append(f'<path class="level" d="M{at:.1f} 32V{bottom}"/>')
    body.append(f'<text class="tick mid" x="{left + wide / 2:.1f}" y="{bottom + 32}">'
                f"{escape(unit)}; dashed: {limit:g} {escape(unit)}</text>")  # fmt: skip
    for place, name in enumerate(names):
        x, y, shade = left + wide + 24, 40 + 16 * place, " hatched" if place // SERIES % 2 else ""
        body.append(f'<rect class="f{place % SERIES}{shade}" x="{x:.1f}" y="{y}" width="10" height="10"/>'
                    f'<text class="tick" x="{x + 16:.1f}" y="{y + 9}">{escape(name)}</text>')  # fmt: skip
    width = max(left + wide + 230, 24 + 7.2 * len(title))
    return _document(width, max(bottom + 44, 52 + 16 * len(names)), body)

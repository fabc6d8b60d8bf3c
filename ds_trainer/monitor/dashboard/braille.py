"""Curves in text: every character is a grid of 2 x 4 dots (Unicode braille)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

# The bit of a dot, by column and row of its character.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_EMPTY = 0x2800
_LABEL = 9  # characters left of the curve


def braille_chart(
    title: str,
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    form: Callable[[float], str] = lambda value: f"{value:.4g}",
) -> list[str]:
    """A curve with its title, the range of its values, and its first and last step.

    Args:
        title: above it.
        points: ``(step, value)`` by step. Values that are not finite are left out.
        width, height: size in characters, with the title and the line of steps.
        form: text of a value.

    Returns:
        ``height`` lines of at most ``width`` characters.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    rows, columns = max(1, height - 2), max(2, width - _LABEL)
    heading = title if not finite else f"{title}  {form(finite[-1][1])}"
    if not finite:
        blank = [""] * rows
        blank[rows // 2] = f"{'':{_LABEL}}no values yet"[:width]
        return [heading[:width], *blank, ""]
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    cells = curve_cells(finite, columns, rows, low, high)
    lines = [heading[:width]]
    for number, cell_row in enumerate(cells):
        label = form(high) if number == 0 else form(low) if number == rows - 1 else ""
        lines.append(f"{label[: _LABEL - 1]:>{_LABEL - 1}} {''.join(cell_row)}")
    first, last = f"{finite[0][0]:.0f}", f"{finite[-1][0]:.0f}"
    gap = max(1, columns - len(first) - len(last))
    return [*lines, f"{'':{_LABEL}}{first}{' ' * gap}{last}"[:width]]


def curve_cells(
    points: Sequence[tuple[float, float]], columns: int, rows: int, low: float, high: float
) -> list[list[str]]:
    """The braille characters of a curve between ``low`` and ``high``.

    Several points of one column of dots are drawn from the smallest to the largest, so that a spike is not lost.
    """
    wide, tall = 2 * columns, 4 * rows
    left, right = points[0][0], points[-1][0]
    span, depth = (right - left) or 1.0, (high / 2 - low / 2) or 1.0  # halves: the difference may be infinite

    def place(value: float) -> int:
        return min(tall - 1, max(0, round((high / 2 - value / 2) / depth * (tall - 1)))) if high > low else tall // 2

    extents: dict[int, tuple[int, int]] = {}
    entries: dict[int, tuple[int, int]] = {}  # first and last point of a column
    for x, y in points:
        column, row = min(wide - 1, int((x - left) / span * (wide - 1) + 0.5)), place(y)
        top, bottom = extents.get(column, (row, row))
        extents[column] = min(top, row), max(bottom, row)
        entries[column] = entries.get(column, (row, row))[0], row
    bits = [[0] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for column in sorted(extents):
        _fill(bits, column, *extents[column])
        if before is not None:
            _connect(bits, before, (column, entries[column][0]))
        before = column, entries[column][1]
    return [[chr(_EMPTY + value) for value in row] for row in bits]


def _fill(bits: list[list[int]], column: int, top: int, bottom: int) -> None:
    for row in range(top, bottom + 1):
        bits[row // 4][column // 2] |= _BITS[column % 2][row % 4]


def _connect(bits: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    """A line between two dots."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    for number in range(1, steps):
        column = round(start[0] + (end[0] - start[0]) * number / steps)
        row = round(start[1] + (end[1] - start[1]) * number / steps)
        _fill(bits, column, row, row)


def bar(share: float, width: int) -> str:
    """A bar of ``width`` characters, of which a share (0 to 1) is full."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    text = "█" * full + ("▏▎▍▌▋▊▉"[part - 1] if part else "")
    return f"{text:·<{width}}"

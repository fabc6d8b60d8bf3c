"""The lines of the dashboard. Pure text: what is shown, from what is known about a run, for a width and a height."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ds_trainer.monitor.memory import BYTES_PER_GB
from ds_trainer.monitor.report.outcome import RunOutcome, outcome_of
from ds_trainer.monitor.report.run_files import RunFiles, is_number
from ds_trainer.monitor.step_line import phrases
from ds_trainer.utils.printable import one_line
from ds_trainer.utils.units import human_bytes, human_count, human_duration

_SIDE_BY_SIDE = 90  # characters from which two curves stand side by side
_RATE_RECORDS = 200  # records that the estimated time is computed from
_MOST_RANKS = 8
_SHOWN = ("loss", "distillation_loss", "grad_norm", "learning_rate")
_SPEED = ("tokens_per_second", "samples_per_second", "mfu", "tflops_per_device", "data_wait")


def screen_lines(files: RunFiles, width: int, height: int, age: float | None) -> list[str]:
    """The dashboard.

    Args:
        files: what the run has written.
        width, height: size of the terminal in characters.
        age: seconds since the metrics file changed; None if there is none.

    Returns:
        At most ``height`` lines of at most ``width`` characters, without control characters.
    """
    width, height = max(20, width), max(6, height)
    outcome = outcome_of(files)
    top = [*_progress(files, outcome, width), *_values(files)]
    bottom = [*_ranks(files, width), *_messages(files), _age(age, outcome)]
    bottom = bottom[-max(1, height - len(top) - 6) :]
    room = height - len(top) - len(bottom)
    lines = [*top, *_curves(files, width, room), *bottom]
    return [one_line(line)[:width] for line in lines[:height]]


def _progress(files: RunFiles, outcome: RunOutcome, width: int) -> list[str]:
    name = files.start.get("run_name") or files.directory.absolute().name
    step, planned = files.last_step, files.summary.get("max_steps")
    first = f"{name}: {outcome.state}"
    if outcome.state not in ("running", "unknown"):
        first += f". {outcome.text}"
    if not is_number(planned) or not planned:
        return [first, f"step {step:,}"]
    share = step / float(planned)
    text = f" {100 * share:3.0f} %  step {step:,}/{planned:,}"
    remaining = _remaining(files, float(planned))
    if remaining is not None and outcome.state in ("running", "unknown"):
        text += f"  ETA {human_duration(remaining)}"
    return [first, bar(share, max(10, width - len(text))) + text]


def _remaining(files: RunFiles, planned: float) -> float | None:
    """Seconds to the end at the rate of the last records, with evaluations and saves."""
    timed = [
        (float(record["time"]), float(record["step"]))
        for record in files.records[-_RATE_RECORDS:]
        if is_number(record.get("time")) and is_number(record.get("step"))
    ]
    if len(timed) < 2 or timed[-1][1] <= timed[0][1] or planned < timed[-1][1]:
        return None
    return (timed[-1][0] - timed[0][0]) / (timed[-1][1] - timed[0][1]) * (planned - timed[-1][1])


def _values(files: RunFiles) -> list[str]:
    """The last values: of the model, of the speed and the memory."""
    last: dict[str, Any] = {}
    for record in files.records[-_RATE_RECORDS:]:
        for name, value in record.items():
            if is_number(value):
                last[name] = value
            elif value is None and record.get(f"{name}_nonfinite"):
                last[name] = float(record[f"{name}_nonfinite"])
    evaluated = [name for name in last if name.startswith("eval_") and name.endswith("loss")]
    model = {name: last[name] for name in (*_SHOWN, *evaluated) if name in last}
    speed = phrases({name: last[name] for name in _SPEED if name in last})
    if is_number(last.get("memory_gb")):
        limit = files.start.get("memory_limit_bytes")
        of_limit = f" of {human_bytes(limit)}" if isinstance(limit, int) else ""
        speed.append(f"memory {human_bytes(last['memory_gb'] * BYTES_PER_GB)}{of_limit}")
    return ["  ".join(phrases(model)) or "no values yet", "  ".join(speed)]


def _curves(files: RunFiles, width: int, room: int) -> list[str]:
    """Loss and gradient norm; evaluation losses and speed if there is room."""
    shown = (files.loss_name, "grad_norm")
    charts: list[tuple[str, Any]] = [(name.replace("_", " "), files.curve(name)) for name in shown]
    evaluations = list(files.evaluation_losses().items())
    charts += [(name.replace("_", " "), points) for name, points in evaluations[:1]]
    charts.append(("tokens/s", files.curve("tokens_per_second")))
    columns = 2 if width >= _SIDE_BY_SIDE else 1
    rows = max(1, min((len(charts) + 1) // columns, room // 6))
    tall = min(14, room // rows)
    if tall < 4:
        return []
    each = (width - 2 * (columns - 1)) // columns
    lines: list[str] = []
    for row in range(rows):
        drawn = [
            braille_chart(title, points, each, tall, human_count if title == "tokens/s" else _number)
            for title, points in charts[row * columns : (row + 1) * columns]
        ]
        lines += ["  ".join(f"{part:<{each}}" for part in parts).rstrip() for parts in zip(*drawn, strict=True)]
    return lines


def _number(value: float) -> str:
    return f"{value:.4g}"


def _ranks(files: RunFiles, width: int) -> list[str]:
    """Where the ranks spent the last window of steps: working, loading data, waiting for others."""
    windows = [window for window in files.stragglers if isinstance(window.get("ranks"), list)]
    if not windows:
        return []
    window = windows[-1]
    size = max(10, min(50, width - 50))
    lines = [f"ranks at step {window.get('step')}: █ work  ▒ data  · waiting for others"]
    for place, rank in list(enumerate(window["ranks"]))[:_MOST_RANKS]:
        step, data, work = (_at(window.get(f"{part}_seconds"), place) for part in ("step", "data", "work"))
        busy = round(size * work / step) if step else 0
        loading = min(size - busy, round(size * data / step)) if step else 0
        text = "█" * busy + "▒" * loading
        slow = "  slow" if window.get("notable") and rank == window.get("slowest_rank") else ""
        lines.append(f"{rank:>5} {text:·<{size}} {1000 * step:.0f} ms{slow}")
    more = int(window.get("world_size") or 0) - min(len(window["ranks"]), _MOST_RANKS)
    return [*lines, f"      and {more} more ranks"] if more > 0 else lines


def _at(values: Sequence[float] | None, place: int) -> float:
    return float(values[place]) if values is not None and place < len(values) else 0.0


def _messages(files: RunFiles) -> list[str]:
    """The last warnings."""
    messages = [message for session in files.sessions for message in session.messages if not message.get("check")]
    return [f"! {message.get('text')}" for message in messages[-2:]]


def _age(age: float | None, outcome: RunOutcome) -> str:
    if age is None:
        return "waiting for metrics.jsonl"
    return f"last record {human_duration(age)} ago" if outcome.state in ("running", "unknown") else "the run has ended"


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

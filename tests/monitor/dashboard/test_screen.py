"""What the dashboard draws."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from ds_trainer.monitor.dashboard.screen import bar, braille_chart, screen_lines
from ds_trainer.monitor.report.run_files import RunFiles
from tests.monitor.report.example_run import example_run


def dots(line: str) -> int:
    return sum(bin(ord(character) - 0x2800).count("1") for character in line if 0x2800 <= ord(character) < 0x2900)


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = braille_chart("loss", [(float(x), float(x)) for x in range(101)], 39, 10)
    assert len(lines) == 10 and all(len(line) <= 39 for line in lines)
    curve = [line[9:] for line in lines[1:-1]]
    places = [[column for column, character in enumerate(row) if ord(character) > 0x2800] for row in curve]
    assert places[0][-1] == 29 and places[-1][0] == 0
    centers = [sum(row) / len(row) for row in places]
    assert centers == sorted(centers, reverse=True)
    assert lines[1].startswith("     100 ") and lines[-2].startswith("       0 ")
    assert lines[0] == "loss  100" and lines[-1].split() == ["0", "100"]


def test_a_single_spike_among_many_points_is_seen() -> None:
    flat = [(float(x), 1.0) for x in range(5000)]
    flat[2500] = (2500.0, 50.0)
    assert dots(braille_chart("loss", flat, 60, 10)[1]) > 0


@pytest.mark.parametrize(
    "points", [[], [(1.0, math.nan)], [(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(5.0, 1e308), (6.0, -1e308)]]
)
def test_no_values_nan_and_constants_are_drawn(points: list[tuple[float, float]]) -> None:
    for size in ((12, 3), (40, 8), (200, 30)):
        lines = braille_chart("loss", points, *size)
        assert len(lines) == size[1] and all(len(line) <= size[0] for line in lines)


def test_a_bar_has_its_width() -> None:
    assert [bar(share, 4) for share in (0.0, 0.5, 1.0, 2.0)] == ["····", "██··", "████", "████"]
    assert all(len(bar(random.random(), 13)) == 13 for _ in range(100))


def test_every_terminal_gets_a_screen_that_fits(tmp_path: Path) -> None:
    files = RunFiles.read(example_run(tmp_path / "chat-8b"))
    for width in (20, 37, 80, 120, 250):
        for height in (6, 10, 24, 50, 90):
            lines = screen_lines(files, width, height, 3.0)
            assert len(lines) <= height and max(map(len, lines)) <= width, (width, height)
    text = "\n".join(screen_lines(files, 120, 50, 3.0))
    for words in (
        "chat-8b: finished", "100 %", "step 600/600", "loss", "grad norm", "eval loss", "MFU", "32.4 GB of 85 GB",
        "ranks at step 600", "7 ", "slow", "the loss is not finite on rank 3"
    ):  # fmt: skip
        assert words in text, words


def test_control_characters_of_a_message_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run")
    history = run / "run_history.jsonl"
    history.write_text(history.read_text().replace("Step 300", "Step\\u001b[2J\\u0007 300"))
    text = "\n".join(screen_lines(RunFiles.read(run), 120, 50, None))
    assert "\x1b" not in text and "\x07" not in text and "[2J" in text

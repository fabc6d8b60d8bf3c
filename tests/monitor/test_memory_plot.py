"""The figure of a plan's memory has all items of all moments, and the size of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ds_trainer.monitor import memory_plot
from ds_trainer.monitor.memory_plot import draw_memory

MOMENTS = {"forward": {"weights": 16e9, "activations": 30e9}, "step": {"weights": 16e9, "optimizer states": 8e9}}


def test_every_bar_has_the_bytes_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = memory_plot.save_figure

    def keep(figure: Figure, path: Path) -> None:
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(memory_plot, "save_figure", keep)
    many = {f"buffer {number}": 1e8 for number in range(15)}  # more items than colors
    assert draw_memory(MOMENTS, {"CUDA context": 0.5e9, **many}, 80e9, "a plan", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    axes = figures[0].axes[0]
    ends = [0.0, 0.0]
    for bars in axes.containers:
        ends = [max(end, bar.get_x() + bar.get_width()) for end, bar in zip(ends, bars, strict=True)]
    assert ends == pytest.approx([48.0, 26.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["forward", "step"]
    assert axes.lines[0].get_xdata()[0] == 80
    looks = {(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in axes.containers}
    assert len(looks) == len(axes.containers) == 19

"""A figure of the memory of a device: one bar for each moment of a step, made of what exists then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ds_trainer.monitor.plots import new_figure, save_figure

_COLORS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7"),
    *("#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#2b2f36", "#c7b299"),
)


def draw_memory(
    moments: Mapping[str, Mapping[str, float]], overhead: Mapping[str, float], room: float, title: str, path: Path
) -> bool:
    """Write a PNG. Returns False without matplotlib, which a log line says.

    Args:
        moments: bytes by item, for each moment in the order of a step.
        overhead: bytes by item that exist at all times.
        room: bytes of the device, drawn as a line.
        title: above the bars.
        path: of the file.
    """
    figure = new_figure(path.name, (9.0, 1.6 + 0.42 * len(moments)))
    if figure is None:
        return False
    axes = figure.add_subplot()
    names = list(moments)
    sizes: dict[str, float] = {}
    for items in (*moments.values(), overhead):
        for item, size in items.items():
            sizes[item] = max(sizes.get(item, 0.0), size)
    left = [0.0] * len(names)
    for number, item in enumerate(sorted(sizes, key=lambda name: -sizes[name])):
        widths = [(moments[name].get(item, 0.0) + overhead.get(item, 0.0)) / 1e9 for name in names]
        hatch = "///" if number >= len(_COLORS) else None
        axes.barh(names, widths, left=left, label=item, color=_COLORS[number % len(_COLORS)], hatch=hatch)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(room / 1e9, color="#2b2f36", linewidth=1.2, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel(f"GB of a device; dashed: its {room / 1e9:.0f} GB")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)
    return True

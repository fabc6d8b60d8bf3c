"""A script on a rank of ``pool.py``, which costs no imports."""

from __future__ import annotations

import runpy
import sys

from ds_trainer.monitor.plots import plot_losses

from ds_trainer.callbacks import metrics_recorder


def run_script(path: str, arguments: list[str]) -> None:
    """The script as ``__main__`` of this rank, whose launcher's variables are those of the pool; with its picture."""
    given, sys.argv = sys.argv, [path, *arguments]
    drawn, metrics_recorder.plot_losses = metrics_recorder.plot_losses, plot_losses
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = given
        metrics_recorder.plot_losses = drawn

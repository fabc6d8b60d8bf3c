"""Records what is logged: ``metrics.jsonl`` during the run, ``loss.png`` and ``metrics.png`` at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.monitor.plots import plot_losses, plot_metrics
from ds_trainer.utils.logging import get_logger

logger = get_logger("callbacks.records")

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"
METRICS_PLOT_NAME = "metrics.png"


class MetricsFileCallback(TrainerCallback):
    """Writes each log event as one line of ``metrics.jsonl`` in ``args.output_dir``, on the first process.

    A line has ``step``, ``epoch``, ``time`` (seconds of training, including those before a resume) and the logs, except
    logs with these names. A resumed run first drops the lines after the step that it resumes from; a new run renames an
    existing file to ``metrics.previous.jsonl``. Evaluations after the training are recorded too; those of a process
    that has not trained are not.

    A write error during training does not end it: there is one warning, and no more records.

    ``baselines``: losses to draw as horizontal lines in ``loss.png``, name to value.
    """

    def __init__(self, baselines: Mapping[str, float] | None = None) -> None:
        self.baselines = dict(baselines or {})
        self._writer: MetricsWriter | None = None
        self._began = 0.0  # value of time.monotonic() at which the run would have begun without interruptions
        self._in_training = False
        self._last_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open ``metrics.jsonl``."""
        if not state.is_world_process_zero:
            return
        if self._writer is not None:  # of an interrupted or an earlier training
            self._writer.close()
        self._writer = MetricsWriter(Path(args.output_dir) / METRICS_NAME)
        earlier = 0.0
        if state.global_step > 0:
            last = self._writer.resume_at(state.global_step)
            earlier = float((last or {}).get("time") or 0.0)
        else:
            self._writer.start_new()
        self._began = time.monotonic() - earlier
        self._last_step = state.global_step
        self._in_training = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Append a line to ``metrics.jsonl``."""
        if self._writer is None or not logs:
            return
        seconds = round(time.monotonic() - self._began, 3)
        position = {"step": state.global_step, "epoch": state.epoch, "time": seconds}
        try:
            if state.global_step < self._last_step:  # after a rollback the later records are no longer part of the run
                self._writer.resume_at(state.global_step)
            self._last_step = state.global_step
            self._writer.write({**position, **logs, **position})
        except OSError as error:
            logger.warning("%s cannot be written (%s); training continues without records", self._writer.path, error)
            self._writer = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw ``loss.png`` and ``metrics.png``."""
        self._in_training = False
        self._plot(args)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Records an evaluation after the training: during one, ``on_log`` does."""
        if not self._in_training:  # the plot includes evaluations of the finished model
            self._plot(args)

    def _plot(self, args: Any) -> None:
        if self._writer is None:
            return
        self._writer.close()  # a later record opens it again
        draw(Path(args.output_dir), self.baselines)


def draw(directory: Path, baselines: Mapping[str, float] | None = None) -> list[Path]:
    """Draw ``loss.png`` and ``metrics.png`` of the run in ``directory``; returns those that were written.

    A disk error is a warning.
    """
    source, written = directory / METRICS_NAME, []
    for name in (PLOT_NAME, METRICS_PLOT_NAME):
        try:
            target = directory / name
            drawn = plot_losses(source, target, baselines) if name == PLOT_NAME else plot_metrics(source, target)
        except OSError as error:
            logger.warning("%s cannot be written: %s", directory / name, error)
        else:
            written += [target] if drawn else []
    return written

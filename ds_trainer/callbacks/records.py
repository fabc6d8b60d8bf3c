"""Keeps what was logged: ``metrics.jsonl`` while the run goes on, ``loss.png`` when it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.monitor.plots import plot_losses
from ds_trainer.monitor.records import MetricsWriter
from ds_trainer.utils.logging import get_logger

logger = get_logger("callbacks.records")

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"


class RecordsCallback(TrainerCallback):
    """Writes each log event as one line of ``metrics.jsonl`` in ``args.output_dir``, on the first process.

    A line holds ``step``, ``epoch``, ``time`` (seconds of training so far; a resumed run counts on) and the logs,
    whose own keys of these names give way. A resumed run first drops the lines beyond the step that it resumes from;
    a new one keeps an older file as ``metrics.previous.jsonl``. Evaluations after the training are recorded too;
    those of a process that has not trained are not.

    A disk that refuses a write while training goes on does not end the training: one warning, and no more records.

    ``baselines``: losses to draw as horizontal lines into ``loss.png``, name to value.
    """

    def __init__(self, baselines: Mapping[str, float] | None = None) -> None:
        self.baselines = dict(baselines or {})
        self._writer: MetricsWriter | None = None
        self._began = 0.0  # moment of time.monotonic() at which the whole run would have begun without a break
        self._in_training = False
        self._last_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self._writer is not None:  # of a training that was interrupted, or of the one before
            self._writer.close()
        self._writer = MetricsWriter(Path(args.output_dir) / METRICS_NAME)
        earlier = 0.0
        if state.global_step > 0:
            last = self._writer.resume_at(state.global_step)
            earlier = float((last or {}).get("time") or 0.0)
        else:
            self._writer.start_anew()
        self._began = time.monotonic() - earlier
        self._last_step = state.global_step
        self._in_training = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self._writer is None or not logs:
            return
        seconds = round(time.monotonic() - self._began, 3)
        place = {"step": state.global_step, "epoch": state.epoch, "time": seconds}
        try:
            if state.global_step < self._last_step:  # the run went back: what was beyond is no part of it any more
                self._writer.resume_at(state.global_step)
            self._last_step = state.global_step
            self._writer.write({**place, **logs, **place})
        except OSError as error:
            logger.warning("%s cannot be written (%s); training goes on without records", self._writer.path, error)
            self._writer = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_training = False
        self._plot(args)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._in_training:  # an evaluation of the finished model belongs into the picture
            self._plot(args)

    def _plot(self, args: Any) -> None:
        if self._writer is None:
            return
        self._writer.close()  # a later record opens it again
        target = Path(args.output_dir) / PLOT_NAME
        try:
            plot_losses(self._writer.path, target, self.baselines)
        except OSError as error:
            logger.warning("%s cannot be written: %s", target, error)

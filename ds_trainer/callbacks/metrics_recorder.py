"""Records what is logged: ``metrics.jsonl`` during the run, and ``loss.svg`` at its end if there are baselines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger("callbacks.records")

METRICS_NAME = "metrics.jsonl"


class MetricsFileCallback(TrainerCallback):
    """Writes each log event as one line of ``metrics.jsonl`` in ``args.output_dir``, on the first process.

    A line has ``step``, ``epoch``, ``time`` (seconds of training, including those before a resume) and the logs, except
    logs with these names. A resumed run first drops the lines after the step that it resumes from; a new run renames an
    existing file to ``metrics.previous.jsonl``. Evaluations after the training are recorded too; those of a process
    that has not trained are not.

    A write error during training does not end it: there is one warning, and no more records.

    ``baselines``: losses to compare with, name to value. With them, ``loss.svg`` and ``metrics.svg`` are drawn at the
    end of a training, with the baselines as horizontal lines. ``ds-trainer plot RUN`` draws both for any run.
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
        """Close ``metrics.jsonl``, and draw it beside the baselines if there are any."""
        self._in_training = False
        self._close(args)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close ``metrics.jsonl`` after an evaluation of the finished model, which the charts include."""
        if not self._in_training:
            self._close(args)

    def _close(self, args: Any) -> None:
        if self._writer is None:
            return
        self._writer.close()  # a later record opens it again
        if self.baselines:
            from ds_trainer.monitor.report.writing import write_plots  # not needed before the end of a run

            try:
                write_plots(Path(args.output_dir), self.baselines)
            except (OSError, ConfigError) as error:  # the training is done, whatever happens to these files
                logger.warning("The charts of the run cannot be written: %s", error)

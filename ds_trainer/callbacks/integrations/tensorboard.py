"""TensorBoard: event files below the output directory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.integrations.hyperparameters import arguments, model_configuration
from ds_trainer.callbacks.integrations.tracker import Tracker, number, rewrite_logs
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.utils.secrets import without_secrets


class TensorBoardCallback(Tracker):
    """Writes each log event to TensorBoard: numbers as scalars, strings as text.

    Directory: ``TENSORBOARD_LOGGING_DIR``, or else ``<output_dir>/runs/<time>_<host>``; each trial of a hyperparameter
    search has its own. Arguments, model configuration and compiled DeepSpeed configuration are under Text.

    Args:
        tb_writer: an open ``SummaryWriter`` to use instead.
        deepspeed_config: see :class:`Tracker`.
    """

    name = "tensorboard"
    package = "torch.utils.tensorboard"
    install = "tensorboard"

    def __init__(self, tb_writer: Any = None, deepspeed_config: Callable[[], Mapping[str, Any]] | None = None) -> None:
        super().__init__(deepspeed_config)
        self.tb_writer = tb_writer
        wanted = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self.logging_dir = os.path.expanduser(wanted) if wanted else None
        self._before_trials: str | None = None
        self._in_trial = False

    def start(self, args: Any, state: TrainerState, model: Any) -> None:
        """Open the run and record arguments and model."""
        in_trial = state.is_hyper_param_search and state.trial_name is not None
        if self._in_trial != in_trial:
            self._in_trial = in_trial
            self.logging_dir, self._before_trials = self._before_trials, self.logging_dir
        if in_trial:
            self.logging_dir = str(_default_directory(args) / str(state.trial_name))
        elif self.logging_dir is None:
            self.logging_dir = str(_default_directory(args))
        writer = self._open()
        texts = {"args": arguments(args), "model_config": model_configuration(model)}
        if self.deepspeed_config is not None:
            texts["ds_config"] = without_secrets(self.deepspeed_config())
        for name, values in texts.items():
            if values:
                writer.add_text(name, json.dumps(values, indent=2))
        writer.flush()

    def write(self, logs: dict[str, Any], state: TrainerState) -> None:
        """Record one set of values."""
        writer = self._open()
        for name, value in rewrite_logs(logs).items():
            scalar = number(value)
            if scalar is not None:
                writer.add_scalar(name, scalar, state.global_step)
            elif isinstance(value, str):
                writer.add_text(name, value, state.global_step)
            else:
                self.leave_out(name, value)
        writer.flush()

    def finish(self, args: Any, state: TrainerState, model: Any) -> None:
        """Close the run."""
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None

    def _open(self) -> Any:
        if self.tb_writer is None:  # logs after the training go to a second file in the same directory
            self.tb_writer = self.library().SummaryWriter(log_dir=self.logging_dir)
        return self.tb_writer


def _default_directory(args: Any) -> Path:
    return Path(args.output_dir) / "runs" / f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}"

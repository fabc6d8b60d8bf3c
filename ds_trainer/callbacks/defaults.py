"""The callbacks of every run: when to log, evaluate, save and stop, and what the console shows."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.monitor.metrics_file import LOSSES
from ds_trainer.monitor.step_line import phrases, step_line
from ds_trainer.utils.printable import say
from ds_trainer.utils.units import human_duration

# Short enough to leave the bar some width on 80 columns: all other values are in the lines above it.
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class DefaultFlowCallback(TrainerCallback):
    """Sets the flags of ``control`` according to the strategies and step counts of the arguments.

    ``logging_strategy``, ``eval_strategy`` and ``save_strategy`` are ``"no"``, ``"steps"`` or ``"epoch"`` (strings or
    enums with such values). Any other value, such as saving at the ``"best"`` evaluation, is handled elsewhere and
    leaves its flag unchanged. The step counts are those of the state (:meth:`TrainerState.compute_steps`); below 1
    means never. With the strategy ``"steps"``, the last step is logged, evaluated and saved too. There is no evaluation
    before ``eval_delay`` (steps or epochs, depending on the strategy).
    """

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Decide or show what a step calls for."""
        step = state.global_step
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if _is(args.logging_strategy, "steps") and _is_due(step, state.logging_steps):
            control.should_log = True

        last = step >= state.max_steps
        if last:
            control.should_training_stop = True
            control.should_log = control.should_log or _is(args.logging_strategy, "steps")
        if (
            _is(args.eval_strategy, "steps")
            and (last or _is_due(step, state.eval_steps))
            and (args.eval_delay or 0) <= step
        ):
            control.should_evaluate = True
        if _is(args.save_strategy, "steps") and (last or _is_due(step, state.save_steps)):
            control.should_save = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Decide what the end of an epoch calls for."""
        if _is(args.logging_strategy, "epoch"):
            control.should_log = True
        if _is(args.eval_strategy, "epoch") and (args.eval_delay or 0) <= state.epoch:
            control.should_evaluate = True
        if _is(args.save_strategy, "epoch"):
            control.should_save = True
        return control


class _LogPrinter(TrainerCallback):
    """Base of the callbacks that print log events."""

    _began: tuple[float, int] | None = None
    """The time at which the training of this process began, and the optimizer steps done before."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began = time.monotonic(), state.global_step

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began = None

    def _line(self, logs: Any, state: TrainerState, max_str_len: int = 100) -> str:
        """One line: the step, the values, and during a training the remaining time.

        The estimate includes evaluations and saves at the rate seen so far.
        """
        step, end = state.global_step, ""
        is_summary = "train_runtime" in logs and logs.keys().isdisjoint(LOSSES)  # which has its own times
        if self._began is not None and not is_summary:
            began, first_step = self._began
            if first_step < step < state.max_steps:
                seconds = (time.monotonic() - began) / (step - first_step) * (state.max_steps - step)
                end = f"ETA {human_duration(seconds)}"
        return step_line(logs, step, state.max_steps, max_str_len, end)


class PrinterCallback(_LogPrinter):
    """Prints every log event as one line to standard output, on the first process of each machine."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Show the logs."""
        if state.is_local_process_zero and logs:
            say(self._line(logs, state))


class ProgressCallback(_LogPrinter):
    """Prints every log event as one line to standard output on the first process; on a terminal, with a progress bar.

    The bar (on standard error, below the lines) advances with every step and shows the elapsed and the remaining time,
    the speed and the last loss. An evaluation has a second bar. There is no bar if standard error is not a terminal (a
    file, a batch job), or if ``args.disable_tqdm`` is set.

    ``max_str_len``: logged strings are truncated to this many characters.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: tqdm[Any] | None = None
        self.prediction_bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the progress bar."""
        super().on_train_begin(args, state, control)
        self._close()  # an interrupted training leaves its bars behind
        if _draws_bars(args, state):
            self.training_bar = tqdm(
                total=state.max_steps or None,
                initial=state.global_step,
                unit="step",
                bar_format=_BAR,
                dynamic_ncols=True,
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decide or show what a step calls for."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)  # redraws ten times a second at most

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Show the logs."""
        if not state.is_world_process_zero or not logs:
            return
        losses = {name: logs[name] for name in LOSSES if name in logs}
        if self.training_bar is not None and losses:
            self.training_bar.set_postfix_str("".join(phrases(losses)), refresh=False)
        say(self._line(logs, state, self.max_str_len), tqdm.write)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the bar of the evaluation."""
        if self.prediction_bar is None:
            batches = _length(eval_dataloader)
            if batches is None or not _draws_bars(args, state):
                return
            self.prediction_bar = tqdm(total=batches, desc="evaluation", unit=" batch", leave=False, dynamic_ncols=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar of the evaluation."""
        self._close_prediction_bar()

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Close the bar of the prediction."""
        self._close_prediction_bar()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the progress bar."""
        super().on_train_end(args, state, control)
        self._close()

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    def _close(self) -> None:
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def _is(strategy: Any, name: str) -> bool:
    """Whether a strategy (a string, or an enum member with a string value) is ``name``."""
    return getattr(strategy, "value", strategy) == name


def _is_due(step: int, every: int) -> bool:
    return every >= 1 and step % every == 0


def _draws_bars(args: Any, state: TrainerState) -> bool:
    return state.is_world_process_zero and not getattr(args, "disable_tqdm", False) and _is_terminal(sys.stderr)


def _is_terminal(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with room for two bars; terminals of containers may have no lines at all."""
    try:
        return os.get_terminal_size(stream.fileno()).lines > 2
    except (OSError, ValueError):  # a file or a pipe; a stream without a file, as in a notebook
        return False


def _length(loader: Any) -> int | None:
    """Number of batches; None if the loader has no length (an iterable dataset)."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None

"""The callbacks of every run: when to log, evaluate, save and stop, and what a person sees meanwhile."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.monitor.step_line import phrases, step_line

# tqdm's own bar without the steps per second: the log values that follow say tokens per second, and need the room.
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class DefaultFlowCallback(TrainerCallback):
    """Sets the switches of ``control`` by the strategies and step counts of the arguments.

    ``logging_strategy``, ``eval_strategy`` and ``save_strategy`` are ``"no"``, ``"steps"`` or ``"epoch"`` (strings or
    enums with such values). Any other value, such as saving at the ``"best"`` evaluation, is decided elsewhere and
    leaves its switch alone. The step counts are those of the state (:meth:`TrainerState.compute_steps`); below 1
    means never. The last step is evaluated and saved too where the strategy is ``"steps"``; no evaluation comes before
    ``eval_delay`` (steps or epochs, as the strategy counts).
    """

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        step = state.global_step
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if _is(args.logging_strategy, "steps") and _is_due(step, state.logging_steps):
            control.should_log = True

        last = step >= state.max_steps
        if last:
            control.should_training_stop = True
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
        if _is(args.logging_strategy, "epoch"):
            control.should_log = True
        if _is(args.eval_strategy, "epoch") and (args.eval_delay or 0) <= state.epoch:
            control.should_evaluate = True
        if _is(args.save_strategy, "epoch"):
            control.should_save = True
        return control


class PrinterCallback(TrainerCallback):
    """Prints every log event as one line to standard output, on the first process of each machine."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs:
            print(step_line(logs, state.global_step, state.max_steps), flush=True)


class ProgressCallback(TrainerCallback):
    """Shows the run on the first process: a bar on a terminal, one line per log event elsewhere.

    The bar (on standard error) advances with every step and carries the values of the last log event; evaluation has
    a second bar below it. Results of evaluations, the summary at the end and any other log go as lines above the
    bar, to standard output. Where standard error is no terminal (a file, a batch job), or ``args.disable_tqdm`` is
    set, there is no bar, and every log event is such a line.

    ``max_str_len``: logged strings are cut at this many characters.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: tqdm[Any] | None = None
        self.prediction_bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()  # a training that was interrupted leaves its bars behind
        if _draws_bars(args, state):
            self.training_bar = tqdm(
                total=state.max_steps or None, initial=state.global_step, bar_format=_BAR, dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)  # redraws ten times a second at most

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix_str("  ".join(phrases(logs, self.max_str_len)))
        else:
            tqdm.write(step_line(logs, state.global_step, state.max_steps, self.max_str_len))
            sys.stdout.flush()  # into a pipe or a file, lines would wait for a full buffer

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self.prediction_bar is None:
            batches = _length(eval_dataloader)
            if batches is None or not _draws_bars(args, state):
                return
            self.prediction_bar = tqdm(total=batches, desc="evaluation", unit=" batch", leave=False, dynamic_ncols=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._close_prediction_bar()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
    """Whether a strategy, a string or an enum member with a string value, is ``name``."""
    return getattr(strategy, "value", strategy) == name


def _is_due(step: int, every: int) -> bool:
    return every >= 1 and step % every == 0


def _draws_bars(args: Any, state: TrainerState) -> bool:
    return state.is_world_process_zero and not getattr(args, "disable_tqdm", False) and _is_terminal(sys.stderr)


def _is_terminal(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with room for two bars. (Terminals of containers may have no lines at all.)"""
    try:
        return os.get_terminal_size(stream.fileno()).lines > 2
    except (OSError, ValueError):  # a file or a pipe; a stream without a file, as in a notebook
        return False


def _length(loader: Any) -> int | None:
    """Number of batches, None for a loader that does not know it (an iterable data set)."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None

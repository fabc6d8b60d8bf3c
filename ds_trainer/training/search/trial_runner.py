"""``TrialRunner``: the state of a hyperparameter search in a Trainer: the current trial and its reports."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.callbacks.state import TrainerControl, export_states, restore_states
from ds_trainer.training.search.objective import checked_objective
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ds_trainer.training.search.trial import SearchTrial

Report = Callable[[Any, int, dict[str, Any]], bool]
"""``report(objective, step, metrics)`` after each evaluation, on rank 0: whether to prune the trial."""


# Arguments whose default follows from other arguments; recomputed if a trial changes those.
_DERIVED_FROM = {
    "eval_steps": ("eval_strategy", "logging_steps"),
    "greater_is_better": ("metric_for_best_model", "load_best_model_at_end"),
}


class TrialRunner:
    """Gives the Trainer the arguments of each trial, and reports the objectives of its evaluations.

    Args:
        events: arguments, state and callbacks of the Trainer.
        use_arguments: makes the Trainer use other arguments, with a new model.
        refresh: makes the Trainer apply changes that the user has made to its arguments.
        release: makes the Trainer release its engines and its model.

    Attributes:
        trial: the current trial; None outside of a search.
        objective: the objective of the last evaluation of the trial.
        searches: whether a search is in progress.
    """

    def __init__(
        self,
        events: TrainingEvents,
        use_arguments: Callable[[TrainingArguments], None],
        refresh: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self.trial: SearchTrial | None = None
        self.objective: Any = None
        self.searches = False
        self._events = events
        self._use_arguments = use_arguments
        self._refresh = refresh
        self._release = release
        self._user_args: TrainingArguments | None = None  # the arguments of the Trainer, while it trains a trial
        self._report: Report | None = None
        self._directions: int | None = None
        self._compute_objective: Callable[[dict[str, Any]], Any] | None = None
        self._callbacks_at_start: dict[str, Any] | None = None

    # -- a search -----------------------------------------------------------------------------------------------------

    def start_search(self, compute_objective: Callable[[dict[str, Any]], Any]) -> None:
        """Begin a search. Trials start with the current state of the callbacks."""
        self.searches = True
        self._compute_objective = compute_objective
        self._callbacks_at_start = copy.deepcopy(export_states(self._events.handler.callbacks))

    def end_search(self) -> None:
        """End the search."""
        self.searches, self._report, self._callbacks_at_start = False, None, None

    # -- a trial ------------------------------------------------------------------------------------------------------

    def select(self, trial: Any, model_init: Callable[..., Any] | None) -> None:
        """Make the Trainer use the arguments of ``trial``.

        Args:
            trial: values of arguments by name, or a trial of a backend; None for the arguments of the Trainer.
            model_init: creates the model of each trial.

        Raises:
            ConfigError: the values are invalid, or there is no ``model_init``.
        """
        user_args = self._events.args if self._user_args is None else self._user_args
        if trial is None:
            trained_trial = self._user_args is not None
            self.trial = self._user_args = None
            if trained_trial:
                self._use_arguments(user_args)
            else:
                self._refresh()
            return
        if model_init is None:
            raise ConfigError("train(trial=...) needs a model_init: each trial trains a new model.")
        takes_trial = bool(inspect.signature(model_init).parameters)
        from ds_trainer.training.search.trial import as_trial

        selected = as_trial(trial, argument_names(user_args), takes_trial)
        args = arguments_of(selected, user_args)
        self.trial, self._user_args = selected, user_args
        self._use_arguments(args)

    def reset_callbacks(self) -> None:
        """Before a trial, reset the control, and the callbacks to their state at the start of the search."""
        self._events.control = TrainerControl()
        if self._callbacks_at_start is not None:
            restore_states(self._events.handler.callbacks, copy.deepcopy(self._callbacks_at_start))

    def begin_trial(self, report: Report | None, directions: int | None) -> None:
        """Begin a trial. ``report`` gets ``directions`` objectives (None: one number) after each evaluation."""
        self.objective, self._report, self._directions = None, report, directions

    def record_objective(self, metrics: dict[str, Any]) -> None:
        """Compute and store the objective of ``metrics``."""
        assert self._compute_objective is not None  # a search is in progress
        self.objective = checked_objective(self._compute_objective(dict(metrics)), self._directions)

    def report_evaluation(self, metrics: dict[str, Any]) -> None:
        """In a search, report the objective after each evaluation of the training loop. Then it is collective.

        Raises:
            TrialPruned: the search prunes the trial; on all ranks.
        """
        if not self.searches or self.trial is None:
            return
        self.record_objective(metrics)
        pruned = False
        if self._report is not None:
            pruned = self._report(self.objective, self._events.state.global_step, dict(metrics))
        if distributed.agree(torch.tensor([int(pruned)]))[0]:
            self._events.notify("on_train_end")
            from ds_trainer.training.search.trial import TrialPruned

            raise TrialPruned(f"{self.trial.where} was pruned after step {self._events.state.global_step}")

    def end_trial(self, failed: bool) -> None:
        """Release the memory of a trial. If it failed, also end the runs of the trackers."""
        from ds_trainer.callbacks.integrations.tracker import Tracker

        events = self._events
        if failed:
            for callback in events.handler.callbacks:
                if isinstance(callback, Tracker):
                    callback.on_train_end(events.args, events.state, events.control)
        self._release()


def argument_names(args: TrainingArguments) -> set[str]:
    """Names of the arguments that a trial may set."""
    return {field.name for field in dataclasses.fields(args) if field.init}


def arguments_of(trial: SearchTrial, args: TrainingArguments) -> TrainingArguments:
    """A copy of ``args`` with the values of ``trial``. Its files go to a separate directory.

    Raises:
        SearchError: a name is not an argument.
        ConfigError: values are invalid or contradict each other; each problem lists the values of the trial.
    """
    check_names(trial.values, args)
    values = {name: _as_declared(name, value, args) for name, value in trial.values.items()}
    for name, sources in _DERIVED_FROM.items():
        if name not in values and not args.given(name) and any(source in values for source in sources):
            values[name] = None
    changed = copy.copy(args)
    try:
        changed.change(**values)
    except ConfigError as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in trial.values.items())
        raise ConfigError([f"{problem} ({trial.where}: {shown})" for problem in error.problems]) from error
    changed.origins = {**args.origins, **dict.fromkeys(trial.values, trial.where)}
    if trial.name is not None:
        parent = Path(str(changed.output_dir))
        changed.run_name = changed.run_name or str(parent)  # trackers group the trials by it
        changed.output_dir = str(parent / trial.name)
    return changed


def check_names(names: Mapping[str, Any], args: TrainingArguments) -> None:
    """Reject hyperparameters that are not arguments.

    Raises:
        SearchError: lists all of them.
    """
    from ds_trainer.training.search.trial import SearchError

    known = argument_names(args)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SearchError(
            [
                f"hyperparameter {name!r} is not an argument of {type(args).__name__}.{did_you_mean(name, known)} "
                "For values that only the model uses, read trial.params in model_init(trial), and leave them out of "
                "the values that hp_space returns."
                for name in unknown
            ]
        )


def _as_declared(name: str, value: Any, args: TrainingArguments) -> Any:
    """Convert numpy scalars to Python numbers, and 8.0 to 8 for an int field: samplers may return either."""
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        value = value.item()
    hint = typing.get_type_hints(type(args)).get(name)
    members = typing.get_args(hint) or (hint,)
    if isinstance(value, float) and value.is_integer() and int in members and float not in members:
        return int(value)
    return value

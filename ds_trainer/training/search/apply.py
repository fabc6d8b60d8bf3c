"""Sets the values of a trial in a copy of the arguments, with the same checks as for the values of a user."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.training.search.trial import SearchError, SearchTrial
from ds_trainer.utils.errors import ConfigError, did_you_mean

# Arguments whose default follows from other arguments; recomputed if a trial changes those.
_DERIVED_FROM = {
    "eval_steps": ("eval_strategy", "logging_steps"),
    "greater_is_better": ("metric_for_best_model", "load_best_model_at_end"),
}


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

"""A trial's values put into a copy of the arguments, through the same checks as a user's own."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.training.search.trial import SearchEnds, SearchTrial
from ds_trainer.utils.errors import ConfigError, did_you_mean

# Filled in from other arguments where they were not given: to be filled in anew where a trial changes those.
_FOLLOWS = {
    "eval_steps": ("eval_strategy", "logging_steps"),
    "greater_is_better": ("metric_for_best_model", "load_best_model_at_end"),
}


def argument_names(args: TrainingArguments) -> set[str]:
    """What a trial may set."""
    return {field.name for field in dataclasses.fields(args) if field.init}


def arguments_of(trial: SearchTrial, args: TrainingArguments) -> TrainingArguments:
    """A copy of ``args`` with the trial's values in it; its files go to a directory of its own.

    Raises:
        SearchEnds: a name is not an argument.
        ConfigError: a value cannot work, alone or with the others; each problem names the trial's values.
    """
    check_names(trial.values, args)
    values = {name: _as_declared(name, value, args) for name, value in trial.values.items()}
    for name, sources in _FOLLOWS.items():
        if name not in values and not args.given(name) and any(source in values for source in sources):
            values[name] = None
    changed = copy.copy(args)
    try:
        changed._changed(**values)
    except ConfigError as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in trial.values.items())
        raise ConfigError([f"{problem} ({trial.where}: {shown})" for problem in error.problems]) from error
    changed.origins = {**args.origins, **dict.fromkeys(trial.values, trial.where)}
    if trial.name is not None:
        parent = Path(str(changed.output_dir))
        changed.run_name = changed.run_name or str(parent)  # what trackers group the trials by
        changed.output_dir = str(parent / trial.name)
    return changed


def check_names(names: Mapping[str, Any], args: TrainingArguments) -> None:
    """Refuse hyper-parameters that are not arguments.

    Raises:
        SearchEnds: names all of them.
    """
    known = argument_names(args)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SearchEnds(
            [
                f"hyper-parameter {name!r} is not an argument of {type(args).__name__}.{did_you_mean(name, known)} "
                "What only the model needs is read in model_init(trial) from trial.params; leave it out of what "
                "hp_space returns."
                for name in unknown
            ]
        )


def _as_declared(name: str, value: Any, args: TrainingArguments) -> Any:
    """Numbers of numpy as Python's, and 8.0 as 8 where a whole number is declared: samplers are not particular."""
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        value = value.item()
    hint = typing.get_type_hints(type(args)).get(name)
    members = typing.get_args(hint) or (hint,)
    if isinstance(value, float) and value.is_integer() and int in members and float not in members:
        return int(value)
    return value

"""Learning-rate schedules by name. Names, arguments and formulas are those of transformers' ``get_scheduler``.

Most are a factor of the peak rate as a function of the optimizer step (:mod:`ds_trainer.optim.factors`): the trainer
steps them once per optimizer step, whatever the number of ranks, and not where an overflow left the weights alone.
``reduce_lr_on_plateau`` and ``greedy`` follow a metric (:mod:`ds_trainer.optim.metric_schedules`): the trainer steps
them after each evaluation during training, on all ranks with the same value.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.optim import factors
from ds_trainer.optim.metric_schedules import GreedySchedule, PlateauSchedule
from ds_trainer.utils.errors import ConfigError, did_you_mean

_ON_METRIC: dict[SchedulerType, Any] = {
    SchedulerType.REDUCE_ON_PLATEAU: PlateauSchedule,
    SchedulerType.GREEDY: GreedySchedule,
}
_FACTORS: dict[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: factors.linear,
    SchedulerType.COSINE: factors.cosine,
    SchedulerType.COSINE_WITH_RESTARTS: factors.cosine_with_restarts,
    SchedulerType.POLYNOMIAL: factors.polynomial,
    SchedulerType.CONSTANT: factors.constant,
    SchedulerType.CONSTANT_WITH_WARMUP: factors.constant_with_warmup,
    SchedulerType.INVERSE_SQRT: factors.inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: factors.cosine_with_min_lr,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: factors.cosine_warmup_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: factors.warmup_stable_decay,
}
# What the trainer gives to every factor; all other parameters are the schedule's own.
_GIVEN = ("step", "warmup", "total", "peak")


def build_schedule(
    name: SchedulerType | str, optimizer: Optimizer, warmup: int, total: int, arguments: Mapping[str, Any] | None = None
) -> Any:
    """The schedule ``name`` over ``optimizer``: it has ``step``, ``get_last_lr``, ``state_dict``, ``load_state_dict``.

    Args:
        name: one of :class:`SchedulerType`.
        optimizer: whose param_groups carry the learning rate; ``defaults["lr"]`` is the peak.
        warmup: optimizer steps of warm-up.
        total: optimizer steps of the whole training.
        arguments: extra arguments of the schedule.

    Raises:
        ConfigError: an argument that the schedule does not have, or a value that cannot work.
    """
    kind = SchedulerType(name)
    peak = float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))  # DeepSpeed's Muon has no default
    given = check_schedule(kind, arguments, peak)
    if kind in _ON_METRIC:
        try:
            return _ON_METRIC[kind](optimizer, **given)
        except ValueError as error:
            raise ConfigError(f"lr_scheduler_kwargs={given} of lr_scheduler_type={kind}: {error}.") from error
    return LambdaLR(optimizer, partial(_FACTORS[kind], warmup=warmup, total=total, peak=peak, **given))


def check_schedule(name: SchedulerType | str, arguments: Mapping[str, Any] | None, peak: float) -> dict[str, Any]:
    """The arguments as the schedule ``name`` takes them. Needs no optimizer, so it can be asked early.

    Raises:
        ConfigError: with a sentence for each.
    """
    kind = SchedulerType(name)
    hints = schedule_arguments(kind)
    given = dict(arguments or {})
    of = f"lr_scheduler_type={kind}"
    problems = []
    for key, value in given.items():
        if key not in hints:
            problems.append(
                f"lr_scheduler_kwargs: '{key}' is not an argument of {of}; known are {', '.join(hints) or 'none'}."
                f"{did_you_mean(key, tuple(hints))}"
            )
            continue
        try:
            given[key] = read_as(_located(value), hints[key])
        except WrongType:
            problems.append(f"lr_scheduler_kwargs: {key}={value!r} of {of} must be {describe(hints[key])}.")
    problems += [] if problems else _wrong_values(kind, given, peak)
    if problems:
        raise ConfigError(problems)
    return given


def schedule_arguments(name: SchedulerType | str) -> dict[str, Any]:
    """The arguments that a schedule takes beside those that the trainer gives, with their types."""
    kind = SchedulerType(name)
    function: Any = _FACTORS.get(kind) or _ON_METRIC[kind].__init__
    given = _GIVEN if kind in _FACTORS else ("self", "optimizer")
    hints = typing.get_type_hints(function)
    return {key: hints[key] for key in inspect.signature(function).parameters if key not in given}


def _located(value: Any) -> Located:
    return Located([Located(entry, "") for entry in value] if isinstance(value, list | tuple) else value, "")


def _wrong_values(kind: SchedulerType, given: dict[str, Any], peak: float) -> list[str]:
    of = f"lr_scheduler_type={kind}"
    if kind in (SchedulerType.COSINE_WITH_MIN_LR, SchedulerType.COSINE_WARMUP_WITH_MIN_LR):
        asked = [f"{key}={given[key]!r}" for key in ("min_lr", "min_lr_rate") if given.get(key) is not None]
        if len(asked) != 1:
            return [
                f"{of} needs one of min_lr and min_lr_rate in lr_scheduler_kwargs, and has "
                f"{' and '.join(asked) or 'neither'}."
            ]
        if given.get("min_lr") is not None and peak == 0:
            return [f"{of}: min_lr={given['min_lr']!r} is a share of learning_rate, which is 0. Raise learning_rate."]
    if kind == SchedulerType.POLYNOMIAL:
        end = given.get("lr_end", factors.POLYNOMIAL_END)
        if not end < peak:
            return [f"{of}: lr_end={end!r} must be below learning_rate={peak!r}. Lower lr_end or raise learning_rate."]
    if kind == SchedulerType.WARMUP_STABLE_DECAY and "num_decay_steps" not in given:
        return [f"{of} needs num_decay_steps in lr_scheduler_kwargs: the optimizer steps of the decay at the end."]
    if kind in _ON_METRIC and given.get("factor", 0.1) >= 1.0:
        return [f"{of}: factor={given['factor']!r} of lr_scheduler_kwargs must be below 1."]
    return []

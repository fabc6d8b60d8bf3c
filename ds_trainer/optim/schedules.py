"""Learning-rate schedules by name. Names, arguments and formulas are those of transformers' ``get_scheduler``.

Most are a factor of the peak learning rate as a function of the optimizer step: the trainer steps them once per
optimizer step, for any number of ranks, and not after a skipped update. ``reduce_lr_on_plateau`` and ``greedy`` follow
a metric (:mod:`ds_trainer.optim.metric_schedules`): the trainer steps them after each evaluation during training, with
the same value on all ranks.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.optim.metric_schedules import Mode, PlateauSchedule, ThresholdMode, greedy_schedule_class
from ds_trainer.utils.errors import ConfigError, did_you_mean

POLYNOMIAL_END = 1e-7
Shape = Literal["linear", "cosine", "1-sqrt"]


# -- factors of the peak learning rate ---------------------------------------------------------------------------------
#
# Every function takes ``step`` (finished optimizer steps). Its other parameters are keywords with the names and
# meanings of the keywords that ``get_scheduler`` of transformers 5 gives its functions, so that scripts find the same
# ones in ``lr_scheduler.lr_lambdas[0].keywords``: build_schedule fills in all of them. ``lr_init`` is the optimizer's
# rate.


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Up to 1 over ``num_warmup_steps``, then straight down to 0 at ``num_training_steps``."""
    if step < num_warmup_steps:
        return _ramp(step, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def cosine(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> float:
    """Up to 1 over ``num_warmup_steps``, then along ``num_cycles`` waves of a cosine; half a wave ends at 0."""
    if step < num_warmup_steps:
        return _ramp(step, num_warmup_steps)
    return max(0.0, _wave(num_cycles, _progress(step, num_warmup_steps, num_training_steps)))


def cosine_with_restarts(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 1) -> float:
    """Up to 1, then ``num_cycles`` times down along half a cosine, restarting from 1 each time; 0 at the end."""
    if step < num_warmup_steps:
        return _ramp(step, num_warmup_steps)
    progress = _progress(step, num_warmup_steps, num_training_steps)
    if progress >= 1.0:
        return 0.0
    return max(0.0, _wave(0.5, (num_cycles * progress) % 1.0))


def polynomial(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_init: float,
    lr_end: float = POLYNOMIAL_END,
    power: float = 1.0,
) -> float:
    """Up to 1, then down to the learning rate ``lr_end`` at the end, as the remaining fraction to the ``power``."""
    if step < num_warmup_steps:
        return _ramp(step, num_warmup_steps)
    if step > num_training_steps:
        return lr_end / lr_init
    remaining = 1.0 - (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def constant(step: int) -> float:
    """Always 1: warm-up is for ``constant_with_warmup``."""
    return 1.0


def constant_with_warmup(step: int, *, num_warmup_steps: int) -> float:
    """Up to 1 over ``num_warmup_steps``, then 1."""
    return _ramp(step, num_warmup_steps) if step < num_warmup_steps else 1.0


def inverse_sqrt(step: int, *, num_warmup_steps: int, timescale: int) -> float:
    """Up to 1, then ``1 / sqrt((step + timescale - num_warmup_steps) / timescale)``."""
    if step < num_warmup_steps:
        return _ramp(step, num_warmup_steps)
    return 1.0 / math.sqrt((step + timescale - num_warmup_steps) / timescale)


def cosine_with_min_lr(
    step: int, *, num_warmup_steps: int, num_training_steps: int, min_lr_rate: float, num_cycles: float = 0.5
) -> float:
    """:func:`cosine` that ends at ``min_lr_rate``."""
    if step < num_warmup_steps:
        return _ramp(step, num_warmup_steps)
    wave = _wave(num_cycles, _progress(step, num_warmup_steps, num_training_steps))
    return max(0.0, _from(min_lr_rate, wave))


def cosine_warmup_with_min_lr(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_rate: float,
    num_cycles: float = 0.5,
    warmup_lr_rate: float | None = None,
) -> float:
    """:func:`cosine_with_min_lr` one step ahead, so that no step has a learning rate of 0.

    Warm-up starts at ``warmup_lr_rate`` times the peak; by default at ``1 / num_warmup_steps`` of it.
    """
    if step < num_warmup_steps and warmup_lr_rate is None:
        return (step + 1.0) / max(1.0, num_warmup_steps)
    if step < num_warmup_steps:
        return _from(warmup_lr_rate or 0.0, step / max(1, num_warmup_steps - 1))
    wave = _wave(num_cycles, _progress(step + 1, num_warmup_steps, num_training_steps))
    return max(0.0, _from(min_lr_rate, wave))


def warmup_stable_decay(
    step: int,
    *,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_stable_steps: int,
    warmup_type: Shape = "linear",
    decay_type: Shape = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Up from ``min_lr_ratio`` to 1, stay there for ``num_stable_steps``, and down in ``num_decay_steps``."""
    if step < num_warmup_steps:
        done = _ramp(step, num_warmup_steps)
        rising = {
            "linear": done,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * done)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - done),
        }
        return max(0.0, _from(min_lr_ratio, rising[warmup_type]))
    if step < num_warmup_steps + num_stable_steps:
        return 1.0
    if step < num_warmup_steps + num_stable_steps + num_decay_steps:
        done = _ramp(step - num_warmup_steps - num_stable_steps, num_decay_steps)
        falling = {"linear": 1.0 - done, "cosine": _wave(num_cycles, done), "1-sqrt": 1.0 - math.sqrt(done)}
        return max(0.0, _from(min_lr_ratio, falling[decay_type]))
    return min_lr_ratio


def _ramp(step: int, length: int) -> float:
    return step / max(1, length)


def _progress(step: int, warmup: int, total: int) -> float:
    return (step - warmup) / max(1, total - warmup)


def _wave(cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))


def _from(floor: float, factor: float) -> float:
    return factor * (1.0 - floor) + floor


_ON_METRIC: dict[SchedulerType, Callable[[], Any]] = {
    SchedulerType.REDUCE_ON_PLATEAU: lambda: PlateauSchedule,
    SchedulerType.GREEDY: greedy_schedule_class,
}
_FACTORS: dict[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: linear,
    SchedulerType.COSINE: cosine,
    SchedulerType.COSINE_WITH_RESTARTS: cosine_with_restarts,
    SchedulerType.POLYNOMIAL: polynomial,
    SchedulerType.CONSTANT: constant,
    SchedulerType.CONSTANT_WITH_WARMUP: constant_with_warmup,
    SchedulerType.INVERSE_SQRT: inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: cosine_with_min_lr,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: cosine_warmup_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: warmup_stable_decay,
}
# Parameters of the factors that come from the trainer; all others are arguments of the schedule.
_FROM_TRAINER = ("step", "num_warmup_steps", "num_training_steps", "lr_init")
# Arguments that the factors get in another form (_keywords): a fraction instead of a rate, a number instead of None.
_FLOOR: dict[str, Any] = {"min_lr": float | None, "min_lr_rate": float | None}
_IN_ANOTHER_FORM: dict[SchedulerType, dict[str, Any]] = {
    SchedulerType.INVERSE_SQRT: {"timescale": int | None},
    SchedulerType.COSINE_WITH_MIN_LR: _FLOOR,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: _FLOOR,
    SchedulerType.WARMUP_STABLE_DECAY: {"num_stable_steps": int | None},
}


def build_schedule(
    name: SchedulerType | str, optimizer: Optimizer, warmup: int, total: int, arguments: Mapping[str, Any] | None = None
) -> Any:
    """Builds the schedule ``name``; it has ``step``, ``get_last_lr``, ``state_dict`` and ``load_state_dict``.

    Those that depend on the step are torch's ``LambdaLR``, whose ``lr_lambdas[0].keywords`` hold the values of all
    arguments under transformers' names.

    Args:
        name: one of :class:`SchedulerType`.
        optimizer: the optimizer; its ``param_groups`` hold the learning rate, and ``defaults["lr"]`` is the peak.
        warmup: optimizer steps of warm-up.
        total: optimizer steps of the training.
        arguments: extra arguments of the schedule.

    Raises:
        ConfigError: an unknown argument, an invalid value, or a missing package.
    """
    kind = SchedulerType(name)
    rate = optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"])  # DeepSpeed's Muon has no default
    if rate is None:
        raise ConfigError(
            f"The {type(optimizer).__name__} passed to the Trainer computes its own learning rate (lr=None), so "
            f"lr_scheduler_type={kind} has nothing to change. Pass a schedule that only reports it, "
            "optimizers=(optimizer, transformers.optimization.AdafactorSchedule(optimizer)), or give the optimizer a "
            "lr and relative_step=False."
        )
    peak = float(rate)
    options = check_schedule(kind, arguments, peak)
    if kind in _ON_METRIC:
        try:
            return _ON_METRIC[kind]()(optimizer, **options)
        except ValueError as error:
            raise ConfigError(f"lr_scheduler_kwargs={options} of lr_scheduler_type={kind}: {error}.") from error
    return LambdaLR(optimizer, partial(_FACTORS[kind], **_keywords(kind, options, warmup, total, peak)))


def _keywords(kind: SchedulerType, given: Mapping[str, Any], warmup: int, total: int, peak: float) -> dict[str, Any]:
    """All parameters of the factor but the step; those that are not given have defaults."""
    values = {"num_warmup_steps": warmup, "num_training_steps": total, "lr_init": peak, **given}
    if values.get("min_lr") is not None:
        values["min_lr_rate"] = values["min_lr"] / peak
    if values.get("timescale") is None:
        values["timescale"] = warmup or 10_000
    if values.get("num_stable_steps") is None:
        values["num_stable_steps"] = total - warmup - values.get("num_decay_steps", 0)
    parameters = inspect.signature(_FACTORS[kind]).parameters
    return {name: values.get(name, p.default) for name, p in parameters.items() if name != "step"}


def check_schedule(name: SchedulerType | str, arguments: Mapping[str, Any] | None, peak: float) -> dict[str, Any]:
    """Validates and converts the arguments of the schedule ``name``. Needs no optimizer, so it can run early.

    Raises:
        ConfigError: with one sentence per problem.
    """
    kind = SchedulerType(name)
    hints = schedule_arguments(kind)
    options = dict(arguments or {})
    of = f"lr_scheduler_type={kind}"
    problems = []
    for key, value in options.items():
        if key not in hints:
            problems.append(
                f"lr_scheduler_kwargs: '{key}' is not an argument of {of}; its arguments: {', '.join(hints) or 'none'}."
                f"{did_you_mean(key, tuple(hints))}"
            )
            continue
        try:
            options[key] = read_as(_located(value), hints[key])
        except WrongType:
            problems.append(f"lr_scheduler_kwargs: {key}={value!r} of {of} must be {describe(hints[key])}.")
    problems += [] if problems else _wrong_values(kind, options, peak)
    if problems:
        raise ConfigError(problems)
    return options


def schedule_arguments(name: SchedulerType | str) -> dict[str, Any]:
    """The arguments of a schedule, without those that the trainer passes, with their types.

    Raises:
        ConfigError: the schedule needs a package that is not installed.
    """
    kind = SchedulerType(name)
    function: Any = _FACTORS.get(kind) or _constructor(_ON_METRIC[kind]())
    hidden = _FROM_TRAINER if kind in _FACTORS else ("self", "optimizer")
    hints = typing.get_type_hints(function)
    if kind == SchedulerType.GREEDY:
        hints |= {"mode": Mode, "threshold_mode": ThresholdMode}  # transformers: any str
    own = {key: hints[key] for key in inspect.signature(function).parameters if key not in hidden}
    return own | _IN_ANOTHER_FORM.get(kind, {})


def _constructor(cls: type) -> Any:
    """The first ``__init__`` in the class hierarchy that names its arguments."""
    for base in cls.__mro__:
        function = vars(base).get("__init__")
        if function is not None and inspect.getfullargspec(function).varkw is None:
            return function
    raise TypeError(f"{cls} has no constructor that names its arguments")


def _located(value: Any) -> Located:
    return Located([Located(entry, "") for entry in value] if isinstance(value, list | tuple) else value, "")


def _wrong_values(kind: SchedulerType, given: dict[str, Any], peak: float) -> list[str]:
    of = f"lr_scheduler_type={kind}"
    if kind in (SchedulerType.COSINE_WITH_MIN_LR, SchedulerType.COSINE_WARMUP_WITH_MIN_LR):
        floors = [f"{key}={given[key]!r}" for key in ("min_lr", "min_lr_rate") if given.get(key) is not None]
        if len(floors) != 1:
            return [
                f"{of} needs exactly one of min_lr and min_lr_rate in lr_scheduler_kwargs, but has "
                f"{' and '.join(floors) or 'neither'}."
            ]
        if given.get("min_lr") is not None and peak == 0:
            return [
                f"{of}: min_lr={given['min_lr']!r} is a fraction of learning_rate, which is 0. Raise learning_rate."
            ]
    if kind == SchedulerType.POLYNOMIAL:
        end = given.get("lr_end", POLYNOMIAL_END)
        if not end < peak:
            return [f"{of}: lr_end={end!r} must be below learning_rate={peak!r}. Lower lr_end or raise learning_rate."]
    if kind == SchedulerType.WARMUP_STABLE_DECAY and "num_decay_steps" not in given:
        return [f"{of} needs num_decay_steps in lr_scheduler_kwargs: the optimizer steps of the decay at the end."]
    if kind in _ON_METRIC and given.get("factor", 0.1) >= 1.0:
        return [f"{of}: factor={given['factor']!r} of lr_scheduler_kwargs must be below 1."]
    return []

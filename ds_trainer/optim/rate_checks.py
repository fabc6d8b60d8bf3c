"""Learning rates that no sane run has: refused where they are certainly a mistake, else a warning.

An update of Adam and its relatives is about as large as the learning rate, whatever the gradient is, so their rates can
be judged. The rate of SGD depends on the size of the gradient, and Prodigy, D-Adaptation, Adadelta and schedule-free
optimizers take rates of about 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

_ADAPTIVE = ("adam", "lion", "adafactor", "lamb", "adan", "sophia", "adalomo", "came")
_OTHER_SCALE = ("prodigy", "dadapt", "schedulefree", "adadelta")
_REFUSED, _HIGH, _LOW = 10.0, 0.1, 1e-9
_REFUSED_OTHER, _HIGH_OTHER = 1e4, 100.0
_ADAPTER_LOW = 1e-6
_WHOLE_HIGH, _LARGE = 1e-3, 1e9  # of models with so many trained elements
_POINTS = 64  # of a schedule


def typo_of(rate: float) -> str:
    """`` Did you mean 2e-05?`` for ``2e5``."""
    if not math.isfinite(rate) or rate < 10:
        return ""
    exponent = math.floor(math.log10(rate))
    return f" Did you mean {rate / 10**exponent * 10.0**-exponent:.3g}?"


def is_adaptive(optimizer: Any) -> bool:
    """Whether the updates of ``optimizer`` are about as large as its learning rate."""
    name = type(optimizer).__name__.lower()
    return any(part in name for part in _ADAPTIVE) and not any(part in name for part in _OTHER_SCALE)


def rate_warnings(optimizer: Any, adapters_only: bool, trained: int) -> Iterator[str]:
    """One sentence for each peak learning rate of ``optimizer`` that is unusual.

    Args:
        optimizer: the one that steps.
        adapters_only: whether only adapters are trained.
        trained: elements of the trained tensors.

    Raises:
        ConfigError: a rate that is certainly a mistake.
    """
    rates = {_peak(group) for group in optimizer.param_groups} - {None}
    name, adaptive = type(optimizer).__name__, is_adaptive(optimizer)
    highest = max((rate for rate in rates if rate is not None), default=None)
    if highest is None:  # it finds its own
        return
    shown = f"The learning rate {highest:.3g} of {name}"
    if highest >= (_REFUSED if adaptive else _REFUSED_OTHER):
        why = "each step moves each weight by about that much" if adaptive else "no gradient is that small"
        raise ConfigError(f"{shown} is a mistake: {why}.{typo_of(highest)} Lower learning_rate.")
    if highest == 0:
        yield f"{shown}: no weight changes. Set learning_rate."
    elif highest < _LOW:
        yield f"{shown} is too small for any weight to change. Raise learning_rate."
    elif highest > (_HIGH if adaptive else _HIGH_OTHER):
        yield f"{shown} is far above what trains a model.{typo_of(highest)} Lower learning_rate."
    elif adaptive and adapters_only and highest < _ADAPTER_LOW:
        yield (
            f"{shown} is very small for adapters, which are trained with about 1e-4: they will hardly change. Raise "
            "learning_rate."
        )
    elif adaptive and not adapters_only and highest >= _WHOLE_HIGH and trained >= _LARGE:
        yield (
            f"{shown} is high for {trained / 1e9:.3g} billion trained elements, for which 1e-5 to 3e-4 is usual: it "
            "may undo what they know, or diverge. Lower learning_rate."
        )


def _peak(group: dict[str, Any]) -> float | None:
    rate = group.get("initial_lr", group.get("lr"))
    return None if rate is None else float(rate)


def schedule_warnings(schedule: Any, steps: int) -> Iterator[str]:
    """One sentence for a schedule that does not fit a run of ``steps`` optimizer steps.

    Args:
        schedule: in use; only torch's ``LambdaLR`` and those with ``total_steps`` can be read ahead.
        steps: the steps of the whole run.

    Raises:
        ConfigError: a learning rate would be negative, or the schedule ends before the run.
    """
    total = getattr(schedule, "total_steps", None)
    if isinstance(total, int) and total < steps:
        raise ConfigError(
            f"The {type(schedule).__name__} has total_steps={total}, but the run has {steps} optimizer steps, and "
            f"such a schedule cannot go on. Make it with total_steps={steps}, or set max_steps={total}."
        )
    warmup = 0
    if isinstance(schedule, LambdaLR) and steps > 0:
        points = sorted({round(step * (steps - 1) / (_POINTS - 1)) for step in range(_POINTS)})
        factors: list[Callable[[int], float]] = schedule.lr_lambdas
        lowest, step = min((float(factor(step)), step) for factor in factors for step in points)
        if lowest < 0:
            raise ConfigError(
                f"The schedule gives the learning rate the factor {lowest:.3g} in step {step + 1} of {steps}: with a "
                "negative learning rate training raises the loss. Correct the schedule, or the number of steps for "
                "which it was made."
            )
        warmup = max(getattr(factor, "keywords", {}).get("num_warmup_steps", 0) for factor in factors)
    if warmup >= steps > 1:
        yield (
            f"warmup_steps={warmup} is not below the {counted(steps, 'step')} of this run, so the learning rate is "
            "rising until the end and never reaches learning_rate. Lower "
            "warmup_steps (below 1 it is a fraction of all steps)."
        )

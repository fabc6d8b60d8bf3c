"""Learning-rate schedules: each a factor of the peak rate as a function of the optimizer step.

Formulas and names as in transformers' ``get_scheduler``. The trainer steps the schedule once per optimizer step,
whatever the number of ranks, and not where fp16 overflowed and nothing was updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.utils.errors import ConfigError, did_you_mean


def _warmup(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def linear(step: int, *, warmup: int, total: int) -> float:
    """Up to 1 over ``warmup`` steps, then straight down to 0 at ``total``."""
    if step < warmup:
        return _warmup(step, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def cosine(step: int, *, warmup: int, total: int, num_cycles: float = 0.5) -> float:
    """Up to 1 over ``warmup`` steps, then along ``num_cycles`` waves of a cosine; half a wave ends at 0."""
    if step < warmup:
        return _warmup(step, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))


def constant(step: int, *, warmup: int, total: int) -> float:
    """Always 1."""
    return 1.0


def constant_with_warmup(step: int, *, warmup: int, total: int) -> float:
    """Up to 1 over ``warmup`` steps, then 1."""
    return _warmup(step, warmup) if step < warmup else 1.0


_FACTORS: dict[SchedulerType, tuple[Callable[..., float], tuple[str, ...]]] = {
    SchedulerType.LINEAR: (linear, ()),
    SchedulerType.COSINE: (cosine, ("num_cycles",)),
    SchedulerType.CONSTANT: (constant, ()),
    SchedulerType.CONSTANT_WITH_WARMUP: (constant_with_warmup, ()),
}


def build_schedule(
    name: SchedulerType | str, optimizer: Optimizer, warmup: int, total: int, arguments: dict[str, Any] | None = None
) -> LambdaLR:
    """The schedule ``name`` over ``optimizer``.

    Args:
        name: one of :class:`SchedulerType`.
        optimizer: whose param_groups carry the learning rate.
        warmup: optimizer steps of warm-up.
        total: optimizer steps of the whole training.
        arguments: extra arguments of the schedule.

    Raises:
        ConfigError: an argument that the schedule does not have.
    """
    factor, known = _FACTORS[SchedulerType(name)]
    unknown = [key for key in arguments or {} if key not in known]
    if unknown:
        raise ConfigError(
            f"lr_scheduler_kwargs: '{unknown[0]}' is not an argument of lr_scheduler_type={name}; known are "
            f"{', '.join(known) or 'none'}.{did_you_mean(unknown[0], known)}"
        )
    return LambdaLR(optimizer, partial(factor, warmup=warmup, total=total, **(arguments or {})))

"""Schedules that depend on the step only, each a factor of the peak learning rate.

Every function takes ``step`` (finished optimizer steps). Its other parameters are keywords with the names and meanings
of the keywords that ``get_scheduler`` of transformers 5 gives its functions, so that scripts find the same ones in
``lr_scheduler.lr_lambdas[0].keywords``: :mod:`ds_trainer.optim.schedules` fills in all of them. ``lr_init`` is the
optimizer's learning rate.
"""

from __future__ import annotations

import math
from typing import Literal

POLYNOMIAL_END = 1e-7
Shape = Literal["linear", "cosine", "1-sqrt"]


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

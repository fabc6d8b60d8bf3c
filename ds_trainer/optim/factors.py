"""Schedules that follow from the step alone: each a factor of the peak rate.

Every function takes ``step`` (optimizer steps done), ``warmup`` and ``total`` (optimizer steps) and ``peak`` (the
optimizer's rate); all further parameters are those of ``lr_scheduler_kwargs``. Formulas as in transformers 5,
``get_scheduler``.
"""

from __future__ import annotations

import math
from typing import Literal

POLYNOMIAL_END = 1e-7
Shape = Literal["linear", "cosine", "1-sqrt"]


def linear(step: int, *, warmup: int, total: int, peak: float) -> float:
    """Up to 1 over ``warmup`` steps, then straight down to 0 at ``total``."""
    if step < warmup:
        return _ramp(step, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def cosine(step: int, *, warmup: int, total: int, peak: float, num_cycles: float = 0.5) -> float:
    """Up to 1 over ``warmup`` steps, then along ``num_cycles`` waves of a cosine; half a wave ends at 0."""
    if step < warmup:
        return _ramp(step, warmup)
    return max(0.0, _wave(num_cycles, _progress(step, warmup, total)))


def cosine_with_restarts(step: int, *, warmup: int, total: int, peak: float, num_cycles: float = 1) -> float:
    """Up to 1, then ``num_cycles`` times down along half a cosine, each time from 1 again; 0 at ``total``."""
    if step < warmup:
        return _ramp(step, warmup)
    progress = _progress(step, warmup, total)
    if progress >= 1.0:
        return 0.0
    return max(0.0, _wave(0.5, (num_cycles * progress) % 1.0))


def polynomial(
    step: int, *, warmup: int, total: int, peak: float, lr_end: float = POLYNOMIAL_END, power: float = 1.0
) -> float:
    """Up to 1, then down to the rate ``lr_end`` at ``total``, as the remaining share to the ``power``."""
    if step < warmup:
        return _ramp(step, warmup)
    if step > total:
        return lr_end / peak
    remaining = 1.0 - (step - warmup) / max(1, total - warmup)
    return ((peak - lr_end) * remaining**power + lr_end) / peak


def constant(step: int, *, warmup: int, total: int, peak: float) -> float:
    """Always 1: warm-up is for ``constant_with_warmup``."""
    return 1.0


def constant_with_warmup(step: int, *, warmup: int, total: int, peak: float) -> float:
    """Up to 1 over ``warmup`` steps, then 1."""
    return _ramp(step, warmup) if step < warmup else 1.0


def inverse_sqrt(step: int, *, warmup: int, total: int, peak: float, timescale: int | None = None) -> float:
    """Up to 1, then as one over the root of the step.

    ``timescale`` (default: ``warmup``, or 10000 without one) is the number of steps after which the step counted from
    ``timescale - warmup`` before the start has doubled.
    """
    if step < warmup:
        return _ramp(step, warmup)
    scale = timescale if timescale is not None else (warmup or 10_000)
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


def cosine_with_min_lr(
    step: int,
    *,
    warmup: int,
    total: int,
    peak: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """:func:`cosine` that ends at the rate ``min_lr``, or at ``min_lr_rate`` times the peak."""
    if step < warmup:
        return _ramp(step, warmup)
    wave = _wave(num_cycles, _progress(step, warmup, total))
    return max(0.0, _from(_floor(min_lr, min_lr_rate, peak), wave))


def cosine_warmup_with_min_lr(
    step: int,
    *,
    warmup: int,
    total: int,
    peak: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """:func:`cosine_with_min_lr` one step ahead, so that no step has rate 0.

    Warm-up begins at ``warmup_lr_rate`` times the peak; by default at one step's share of it.
    """
    if step < warmup and warmup_lr_rate is None:
        return (step + 1.0) / max(1.0, warmup)
    if step < warmup:
        return _from(warmup_lr_rate or 0.0, step / max(1, warmup - 1))
    wave = _wave(num_cycles, _progress(step + 1, warmup, total))
    return max(0.0, _from(_floor(min_lr, min_lr_rate, peak), wave))


def warmup_stable_decay(
    step: int,
    *,
    warmup: int,
    total: int,
    peak: float,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: Shape = "linear",
    decay_type: Shape = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Up from ``min_lr_ratio`` to 1, stay there, and down to it in the last ``num_decay_steps``.

    ``num_stable_steps`` is what remains of ``total``, unless it is given.
    """
    stable = total - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < warmup:
        done = _ramp(step, warmup)
        rising = {
            "linear": done,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * done)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - done),
        }
        return max(0.0, _from(min_lr_ratio, rising[warmup_type]))
    if step < warmup + stable:
        return 1.0
    if step < warmup + stable + num_decay_steps:
        done = _ramp(step - warmup - stable, num_decay_steps)
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


def _floor(min_lr: float | None, min_lr_rate: float | None, peak: float) -> float:
    return min_lr / peak if min_lr is not None else (min_lr_rate or 0.0)

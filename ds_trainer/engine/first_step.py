"""Keeps DeepSpeed from taking an optimizer step before the first one.

DeepSpeed 0.19.8 (``runtime/fp16/unfused_optimizer.py``) makes the optimizer's state at stage 0 in bf16 or fp16 by a
step with gradients of zero. That step decays the weights, counts for the bias correction of Adam, and fixes the
projections of low-rank optimizers from nothing. The state is made by the first real step anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_step_before_the_first() -> Iterator[None]:
    """While an engine is made, its optimizer is not stepped."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    original = FP16_UnfusedOptimizer.initialize_optimizer_states
    FP16_UnfusedOptimizer.initialize_optimizer_states = lambda self: None
    try:
        yield
    finally:
        FP16_UnfusedOptimizer.initialize_optimizer_states = original

"""Prevents DeepSpeed from taking an optimizer step at construction.

DeepSpeed 0.19.8 (``runtime/fp16/unfused_optimizer.py``) initializes the optimizer's state at stage 0 in bf16 or fp16
with a step whose gradients are zero. That step applies weight decay, counts in Adam's bias correction, and fixes the
projections of low-rank optimizers from zero gradients. The first real step creates the state anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skip_optimizer_state_init() -> Iterator[None]:
    """Inside, constructing an engine does not step its optimizer."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    original = FP16_UnfusedOptimizer.initialize_optimizer_states
    FP16_UnfusedOptimizer.initialize_optimizer_states = lambda self: None
    try:
        yield
    finally:
        FP16_UnfusedOptimizer.initialize_optimizer_states = original

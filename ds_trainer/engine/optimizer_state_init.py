"""Repairs how DeepSpeed 0.19.8 initializes the states of optimizers when an engine is constructed.

At stage 0 in bf16 or fp16 (``runtime/fp16/unfused_optimizer.py``) it takes a step whose gradients are zero. That step
applies weight decay, counts in Adam's bias correction, and fixes the projections of low-rank optimizers from zero
gradients. It is left out: the first real step creates the state anyway.

torch's Adagrad creates its states in its constructor. So under ZeRO (``initialize_optimizer_states`` of
``stage_1_and_2.py`` and ``stage3.py``) DeepSpeed constructs a second one over the flat partitions, with default values
in a single group: the weight decay and learning rates of the groups are lost, and a schedule changes the learning rates
of an optimizer that is never stepped. Here the second one passes its states to the first, which stays in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def repaired_state_init() -> Iterator[None]:
    """Inside, constructing an engine does not step its optimizer, and keeps the object and its groups."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kinds: tuple[Any, ...] = FP16_UnfusedOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
    originals = {kind: kind.initialize_optimizer_states for kind in kinds}
    for kind, make in originals.items():
        kind.initialize_optimizer_states = (lambda self: None) if kind is FP16_UnfusedOptimizer else _keeping(make)
    try:
        yield
    finally:
        for kind, make in originals.items():
            kind.initialize_optimizer_states = make


def _keeping(make_states: Callable[[Any], None]) -> Callable[[Any], None]:
    def initialize_optimizer_states(self: Any) -> None:
        original = self.optimizer
        make_states(self)
        if self.optimizer is not original:
            original.state.clear()  # states of parameters that ZeRO does not step
            original.state.update(self.optimizer.state)
            self.optimizer = original

    return initialize_optimizer_states

"""Adagrad under ZeRO: keeps its parameter groups and the optimizer object that schedules refer to.

torch's Adagrad creates its states in its constructor. So DeepSpeed 0.19.8 constructs a second one over the flat
partitions, with default values in a single group (``initialize_optimizer_states`` of ``stage_1_and_2.py`` and
``stage3.py``): the weight decay and learning rates of the groups are lost, and a schedule changes the learning rates of
an optimizer that is never stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def keep_adagrad_groups() -> Iterator[None]:
    """Inside, an optimizer that DeepSpeed constructs again passes its states to the original, which stays in use."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    originals = {
        kind: kind.initialize_optimizer_states for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    }
    for kind, make in originals.items():
        kind.initialize_optimizer_states = _keeping(make)
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

"""Adagrad under ZeRO: its parameter groups stay, and so does the optimizer that schedules know.

torch's Adagrad makes its states when it is built. So DeepSpeed 0.19.8 builds it anew over the flat partitions, with
default values in one single group (``initialize_optimizer_states`` of ``stage_1_and_2.py`` and ``stage3.py``): weight
decay and learning rates of the groups are lost, and a schedule changes those of an optimizer that nobody steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def groups_of_adagrad() -> Iterator[None]:
    """While an engine is made: an optimizer that DeepSpeed builds anew lends its states to the one it replaces."""
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
        given = self.optimizer
        make_states(self)
        if self.optimizer is not given:
            given.state.clear()  # of parameters that ZeRO does not step
            given.state.update(self.optimizer.state)
            self.optimizer = given

    return initialize_optimizer_states

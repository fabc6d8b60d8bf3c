"""``debug="underflow_overflow"``: stops at the first inf or nan and prints the modules that led to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def overflow_problems() -> list[str]:
    """Reasons why overflows cannot be detected, one sentence each."""
    if importlib.util.find_spec("transformers") is not None:
        return []
    return ["debug=underflow_overflow needs transformers, which is not installed. Run pip install transformers."]


@contextmanager
def detect_overflow(model: nn.Module) -> Iterator[None]:
    """Inside, checks weights, inputs and outputs of every module of ``model``. Slow: it synchronizes at each module.

    At the first inf or nan, transformers' ``DebugUnderflowOverflow`` prints the last modules with their smallest and
    largest absolute values and raises ValueError.
    """
    from transformers.debug_utils import DebugUnderflowOverflow

    class Watch(DebugUnderflowOverflow):
        def register_forward_hook(self) -> None:
            # Before ZeRO-3's hooks, which release the weights; with handles, so that they can be removed.
            self.handles = [m.register_forward_hook(self.forward_hook, prepend=True) for m in self.model.modules()]

    watch = Watch(model)
    try:
        yield
    finally:
        for handle in watch.handles:
            handle.remove()

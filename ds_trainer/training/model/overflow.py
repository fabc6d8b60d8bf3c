"""``debug="underflow_overflow"``: stop at the first inf or nan, and show the modules that led to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def overflow_problems() -> list[str]:
    """Why activations cannot be watched, a sentence each."""
    if importlib.util.find_spec("transformers") is not None:
        return []
    return ["debug=underflow_overflow is done by a part of transformers. Run pip install transformers."]


@contextmanager
def watched_for_overflow(model: nn.Module) -> Iterator[None]:
    """Look at weights, inputs and outputs of every module of ``model`` inside; slow, it waits for each.

    At the first inf or nan transformers' ``DebugUnderflowOverflow`` prints the last modules with their smallest and
    largest absolute values and raises ValueError.
    """
    from transformers.debug_utils import DebugUnderflowOverflow

    class Watch(DebugUnderflowOverflow):
        def register_forward_hook(self) -> None:
            # In front of ZeRO-3's hooks, which let the weights go; and with handles, so that it ends with the training.
            self.handles = [m.register_forward_hook(self.forward_hook, prepend=True) for m in self.model.modules()]

    watch = Watch(model)
    try:
        yield
    finally:
        for handle in watch.handles:
            handle.remove()

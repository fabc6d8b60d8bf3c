"""A model without the hooks of DeepSpeed, for code that one rank runs alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of ``model`` have no forward and backward hooks.

    Those of ZeRO-3 gather weights in each forward pass, which is collective: with complete weights
    (:func:`ds_trainer.engine.weights.gathered`) they are not needed, and on one rank alone they would wait forever.
    """
    modules = list(model.modules())
    before = [(module, name, vars(module)[name]) for module in modules for name in _HOOKS if name in vars(module)]
    for module, name, _ in before:
        setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, name, hooks in before:
            setattr(module, name, hooks)

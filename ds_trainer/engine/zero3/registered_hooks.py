"""Keeps the engine intact when a script removes DeepSpeed's hooks to generate text, and registers them again.

TRL (``unwrap_model_for_generation``) and scripts like it gather all weights, remove the hooks of ZeRO-3, generate, and
then call DeepSpeed's ``_register_deepspeed_module``. That makes new hooks: they run after all others of a module,
modules get new numbers, and hooks of this package that were removed with DeepSpeed's are lost. So this call restores
the removed hooks instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn


def zero3_hooks(engine: Any) -> Any:
    """DeepSpeed's object that holds the module hooks of a ZeRO-3 engine."""
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def restore_hooks_when_registered(engine: Any) -> None:
    """Lets ``_register_deepspeed_module`` restore hooks that were removed. Call it when the engine is complete."""
    offload = zero3_hooks(engine)
    forward, backward = list(offload.forward_hooks), list(offload.backward_hooks)
    saved = SavedHooks([*forward, *backward])
    register = offload._register_deepspeed_module

    def restore(module: nn.Module, *args: Any, **keywords: Any) -> None:
        if module is not offload.module or offload.forward_hooks:
            register(module, *args, **keywords)
            return
        offload.forward_hooks, offload.backward_hooks = list(forward), list(backward)
        saved.restore()

    offload._register_deepspeed_module = restore


class SavedHooks:
    """Functions and positions of module hooks.

    Args:
        handles: what ``register_forward_hook`` and its like returned.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._ids = {handle.id for handle in handles}
        registries = {id(hooks): hooks for handle in handles if (hooks := handle.hooks_dict_ref()) is not None}
        self._before = [(hooks, OrderedDict(hooks)) for hooks in registries.values()]
        # How a hook is called (with keyword arguments, always), which is stored apart from the function.
        options = [(options, handle.id) for handle in handles for ref in handle.extra_dict_ref if (options := ref())]
        self._options = [(found, key, found[key]) for found, key in options if key in found]

    def remove(self) -> None:
        """Remove the hooks. Their options stay."""
        for hooks, _ in self._before:
            for key in self._ids & hooks.keys():
                del hooks[key]

    def restore(self) -> None:
        """Put the hooks back at their positions, before hooks that were added since."""
        for hooks, old in self._before:
            added = {key: hook for key, hook in hooks.items() if key not in old}
            restored = {key: hook for key, hook in old.items() if key in hooks or key in self._ids}
            hooks.clear()
            hooks.update({**restored, **added})
        for options, key, value in self._options:
            options[key] = value

"""Keeps the engine intact when a script removes DeepSpeed's hooks to generate text, and registers them again.

TRL (``unwrap_model_for_generation``) and scripts like it gather all weights, remove the hooks of ZeRO-3, generate, and
then call DeepSpeed's ``_register_deepspeed_module``. That makes new hooks: they run after all others of a module,
modules get new numbers, and hooks of this package that were removed with DeepSpeed's are lost. So this call restores
the removed hooks instead.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.engine.zero3.saved_hooks import SavedHooks


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

"""``Zero3Parts``: what an engine with ZeRO-3 has besides DeepSpeed's own, for training and for evaluation.

Closed engines are released here, because DeepSpeed keeps them, with shards and buffers, until the process ends. Source:
DeepSpeed 0.19: each engine stays in the global stack of modules in a forward pass
(``runtime/zero/parameter_offload.py``), and the cache of a method refers to its coordinator
(``runtime/zero/partitioned_param_coordinator.py``). The functions that gather and release the weights of a module in
the backward pass stay at the module, so the next engine would gather with the coordinator of the closed one, and frozen
weights are missing when their layer is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_trainer.engine.loading.transformers_zero3 import Zero3Registration
from ds_trainer.engine.tensor_parallel.repairs import allow_empty_slices
from ds_trainer.engine.zero3.coalesced_collectives import vectorize_collectives
from ds_trainer.engine.zero3.leaf_modules import delay_leaf_reduction, mark_leaf_modules
from ds_trainer.engine.zero3.lean_hooks import lean_hooks
from ds_trainer.engine.zero3.module_guard import guard_modules

_CACHED = "_PartitionedParameterCoordinator__params_to_release"
_OF_BACKWARD = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining")


class Zero3Parts:
    """Created before DeepSpeed's engine, and told when it exists and when it is complete.

    Args:
        model: the module that will be sharded.

    Attributes:
        guard: stops all ranks if they are about to run different modules; None on one rank.
    """

    def __init__(self, model: nn.Module) -> None:
        mark_leaf_modules(model)
        self._model = model
        self.guard: Any = None
        self._parts: list[Any] = []

    def created(self, engine: Any, settings: dict[str, Any]) -> None:
        """DeepSpeed's ``engine`` exists; ``settings`` are what transformers' ``deepspeed_config()`` returns."""
        self._parts.append(Zero3Registration(settings))
        allow_empty_slices(engine)

    def trains(self) -> None:
        """The engine will run backward passes. Called before it watches gradients."""
        delay_leaf_reduction(self._model)

    def complete(self, engine: Any, compiled: bool) -> None:
        """The engine is complete; with ``compiled`` its model will be compiled."""
        self.guard = guard_modules(engine)
        restore_hooks_when_registered(engine)
        parts = (self.guard, vectorize_collectives(engine), lean_hooks(engine, compiled))
        self._parts += [part for part in parts if part is not None]

    def close(self) -> None:
        """Remove hooks, before DeepSpeed's engine is destroyed."""
        for part in self._parts:
            part.close()

    def release(self, module: nn.Module) -> None:
        """Release the destroyed engine of ``module``. Other engines fill the cache again."""
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [entry for entry in stack if entry is not module]
        cached = vars(PartitionedParameterCoordinator).get(_CACHED)
        for function in (cached, *(cell.cell_contents for cell in getattr(cached, "__closure__", None) or ())):
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        for part in module.modules():
            for name in _OF_BACKWARD:
                vars(part).pop(name, None)


# Keeps the engine intact when a script removes DeepSpeed's hooks to generate text, and registers them again.
#
# TRL (``unwrap_model_for_generation``) and scripts like it gather all weights, remove the hooks of ZeRO-3, generate,
# and then call DeepSpeed's ``_register_deepspeed_module``. That makes new hooks: they run after all others of a module,
# modules get new numbers, and hooks of this package that were removed with DeepSpeed's are lost. So this call restores
# the removed hooks instead.


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

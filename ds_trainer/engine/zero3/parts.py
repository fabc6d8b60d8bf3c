"""``Zero3Parts``: what an engine with ZeRO-3 has besides DeepSpeed's own, for training and for evaluation.

Closed engines are released here, because DeepSpeed keeps them, with shards and buffers, until the process ends. Source:
DeepSpeed 0.19: each engine stays in the global stack of modules in a forward pass
(``runtime/zero/parameter_offload.py``), and the cache of a method refers to its coordinator
(``runtime/zero/partitioned_param_coordinator.py``). The functions that gather and release the weights of a module in
the backward pass stay at the module, so the next engine would gather with the coordinator of the closed one, and frozen
weights are missing when their layer is computed again.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.engine.loading.transformers_zero3 import Zero3Registration
from ds_trainer.engine.tensor_parallel.repairs import allow_empty_slices
from ds_trainer.engine.zero3.coalesced_collectives import vectorize_collectives
from ds_trainer.engine.zero3.leaf_modules import delay_leaf_reduction, mark_leaf_modules
from ds_trainer.engine.zero3.lean_hooks import lean_hooks
from ds_trainer.engine.zero3.module_guard import guard_modules
from ds_trainer.engine.zero3.registered_hooks import restore_hooks_when_registered

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

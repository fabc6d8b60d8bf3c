"""Releases closed ZeRO-3 engines, which DeepSpeed otherwise keeps, with shards and buffers, until the process ends.

Source: DeepSpeed 0.19: each engine stays in the global stack of modules in a forward pass
(``runtime/zero/parameter_offload.py``), and the cache of a method refers to its coordinator
(``runtime/zero/partitioned_param_coordinator.py``). The functions that gather and release the weights of a module in
the backward pass stay at the module, so the next engine would gather with the coordinator of the closed one, and frozen
weights are missing when their layer is computed again.
"""

from __future__ import annotations

from torch import nn

_CACHED = "_PartitionedParameterCoordinator__params_to_release"
_OF_BACKWARD = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining")


def release_engine(module: nn.Module) -> None:
    """Releases the closed engine of ``module``. Other engines fill the cache again."""
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

"""Lets go of ZeRO-3 engines that are closed: DeepSpeed keeps them, with shards and buffers, while the process lives.

Source: deepspeed 0.19: each engine puts its model at the bottom of the list of modules that a forward pass is in
(``runtime/zero/parameter_offload.py``), and a cache of a method keeps its coordinator
(``runtime/zero/partitioned_param_coordinator.py``).
"""

from __future__ import annotations

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

_CACHED = "_PartitionedParameterCoordinator__params_to_release"


def forget_engine(module: nn.Module) -> None:
    """Let go of the engine of ``module``, which is closed. Engines that live fill the cache again."""
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [one for one in stack if one is not module]
    cached = vars(PartitionedParameterCoordinator).get(_CACHED)
    for one in (cached, *(cell.cell_contents for cell in getattr(cached, "__closure__", None) or ())):
        if hasattr(one, "cache_clear"):
            one.cache_clear()

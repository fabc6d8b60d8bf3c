"""Gathers all weights of a ZeRO-3 model on every rank, so that forward passes need no communication.

DeepSpeed gathers weights before a module's forward pass and releases them after it, with hooks on every module. Those
hooks also release weights that ``GatheredParameters`` has gathered (0.19.8: ``release_sub_module`` only checks which
modules currently use a parameter), so the context alone would last for one forward pass of ``generate``. In addition,
while DeepSpeed records the order of modules, each forward pass compares it across ranks. So the hooks are removed as
well, and restored at their old positions afterwards. transformers is told that ranks need not wait for each other.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.engine.loading.transformers_zero3 import independent_ranks
from ds_trainer.engine.tensor_parallel.repairs import materialize_if_empty
from ds_trainer.engine.zero3.registered_hooks import SavedHooks, zero3_hooks
from ds_trainer.utils import distributed
from ds_trainer.utils.host_memory import free_host_memory

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MEMORY_FRACTION = 0.5
"""Gathered weights may use this fraction of free memory; the rest is for caches, activations and outputs."""


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def sharded_parameters(engine: DeepSpeedEngine) -> list[Any]:
    """The parameters that ZeRO-3 shards; empty at lower stages."""
    return [p for p in engine.module.parameters() if hasattr(p, "ds_id") and not materialize_if_empty(p)]


def whole_weights_fit(engine: DeepSpeedEngine) -> bool:
    """Whether all gathered weights would use at most half of the free memory of every rank's device.

    The ranks of a machine share its free host memory. Weights that are offloaded to NVMe never fit: they are there
    because they did not fit into memory. Collective: all ranks get the same result.
    """
    parameters = sharded_parameters(engine)
    device = engine.device
    on_disk = any(_is_on_disk(parameter) for parameter in parameters)
    memory = f"{socket.gethostname()} cpu" if device.type == "cpu" else f"rank {distributed.rank()}"
    needed = sum(int(p.ds_numel) * p.element_size() for p in parameters)
    reports = distributed.gather_to_main((memory, free_memory(device), needed, on_disk)) or ()  # rank 0 decides
    totals: dict[str, int] = {}
    for name, _, size, _ in reports:
        totals[name] = totals.get(name, 0) + size
    fits = all(totals[name] <= free * MEMORY_FRACTION and not disk for name, free, _, disk in reports)
    return bool(distributed.broadcast_object(fits))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``: free memory, plus unused memory in torch's allocator."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return free_host_memory()


def are_whole(parameters: list[Any]) -> bool:
    """Whether this rank holds all of ZeRO-3's ``parameters`` now; also because a script has gathered them."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return all(parameter.ds_status == ZeroParamStatus.AVAILABLE for parameter in parameters)


def forget_order_of_modules(engine: DeepSpeedEngine) -> None:
    """Lets DeepSpeed record the order of modules anew: that of ``generate`` is not that of a training step."""
    coordinator = zero3_hooks(engine).get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    engine.optimizer.empty_partition_cache()


@contextmanager
def whole_weights(engine: DeepSpeedEngine) -> Iterator[None]:
    """Inside, every rank holds all weights, for reading, and forward passes do not communicate.

    Does nothing if the weights are not sharded. Entering is collective unless they are whole already; leaving is not.
    """
    parameters = sharded_parameters(engine)
    if not parameters:
        yield
        return
    import deepspeed

    hooks = zero3_hooks(engine)
    with ExitStack() as stack:
        if not are_whole(parameters):
            # Release prefetched and gathered parameters, so that nothing is in flight.
            engine.optimizer.empty_partition_cache()
            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        saved = SavedHooks([*hooks.forward_hooks, *hooks.backward_hooks, hooks.fwd_pre_hook])
        stack.callback(saved.restore)
        saved.remove()
        with independent_ranks():
            yield


def _is_on_disk(parameter: Any) -> bool:
    return str(getattr(parameter.ds_tensor, "final_location", "")).endswith("nvme")


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

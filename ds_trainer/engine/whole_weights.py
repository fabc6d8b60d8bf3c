"""All weights of a ZeRO-3 model on every rank for a while, so that forward passes need no other rank.

DeepSpeed gathers weights before a module's forward pass and lets them go after it, by hooks on every module. Those
hooks also let go what ``GatheredParameters`` has gathered (0.19.8: ``release_sub_module`` asks only which modules use a
parameter now), so that around ``generate`` the context alone would hold for one forward pass. Besides, while DeepSpeed
records the order of modules, each forward pass compares it over the ranks. So the hooks are taken off too, and
afterwards put back where they were.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.engine.tensor.repairs import present_if_empty
from ds_trainer.utils import distributed
from ds_trainer.utils.host_memory import free_host_memory

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

SHARE_OF_FREE_MEMORY = 0.5
"""Gathered weights may take this much of what is free; the rest is for caches, activations and outputs."""


def sharded_parameters(engine: DeepSpeedEngine) -> list[Any]:
    """The parameters that ZeRO-3 spreads over ranks; empty on lower stages."""
    return [p for p in engine.module.parameters() if hasattr(p, "ds_id") and not present_if_empty(p)]


def whole_weights_fit(engine: DeepSpeedEngine) -> bool:
    """Whether all gathered weights would take at most half of the memory that is free on every rank's device.

    In host memory, the ranks of a machine share what is free. Weights that are kept on NVMe do not fit, whatever their
    size: they are there because they did not. Collective: all ranks get the same answer.
    """
    parameters = sharded_parameters(engine)
    device = engine.device
    on_disk = any(_is_on_disk(parameter) for parameter in parameters)
    place = f"{socket.gethostname()} cpu" if device.type == "cpu" else f"rank {distributed.rank()}"
    needed = sum(int(p.ds_numel) * p.element_size() for p in parameters)
    found = distributed.gather_to_main((place, free_memory(device), needed, on_disk)) or ()  # rank 0 decides
    taken: dict[str, int] = {}
    for where, _, size, _ in found:
        taken[where] = taken.get(where, 0) + size
    fits = all(taken[where] <= free * SHARE_OF_FREE_MEMORY and not disk for where, free, _, disk in found)
    return bool(distributed.broadcast_object(fits))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``: what is free, and what torch's allocator keeps unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return free_host_memory()


@contextmanager
def whole_weights(engine: DeepSpeedEngine) -> Iterator[None]:
    """All weights on every rank inside, to be read; forward passes are no collectives there.

    Nothing to do where they are not sharded. Entering is collective, leaving is not.
    """
    parameters = sharded_parameters(engine)
    if not parameters:
        yield
        return
    import deepspeed

    # What a forward pass has prefetched, or an optimizer step has gathered, is let go: nothing is in flight.
    offload: Any = engine.optimizer  # an engine without optimizer has what shards the weights in its place
    offload.empty_partition_cache()
    hooks = getattr(offload, "parameter_offload", offload)
    with (
        deepspeed.zero.GatheredParameters(parameters),
        _without([*hooks.forward_hooks, *hooks.backward_hooks, hooks.fwd_pre_hook]),
    ):
        yield


@contextmanager
def _without(handles: list[Any]) -> Iterator[None]:
    """Hooks of modules taken off inside; afterwards in their old places, before those that were added meanwhile."""
    ids = {handle.id for handle in handles}
    registries = {id(hooks): hooks for handle in handles if (hooks := handle.hooks_dict_ref()) is not None}
    before = [(hooks, OrderedDict(hooks)) for hooks in registries.values()]
    for hooks in registries.values():
        for key in ids & hooks.keys():
            del hooks[key]
    try:
        yield
    finally:
        for hooks, old in before:
            added = {key: hook for key, hook in hooks.items() if key not in old}
            kept = {key: hook for key, hook in old.items() if key in hooks or key in ids}
            hooks.clear()
            hooks.update({**kept, **added})


def _is_on_disk(parameter: Any) -> bool:
    return str(getattr(parameter.ds_tensor, "final_location", "")).endswith("nvme")

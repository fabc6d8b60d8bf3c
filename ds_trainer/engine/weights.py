"""Reading whole weights out of a (possibly sharded) model, a bounded number of bytes at a time.

Under ZeRO-3 every parameter is spread over all ranks. A shard's parameters are gathered together, copied to host
memory on the main process and let go again, so that no rank ever holds more than one shard of the model on top of its
own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def full_numel(parameter: torch.Tensor) -> int:
    """Elements of the whole tensor, also where only a shard is here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Whole tensors of ``parameters`` inside the context; nothing to do where they are not sharded. Collective."""
    sharded = [p for p in parameters if hasattr(p, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded)


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What belongs into a weight file: parameters and persistent buffers by name, each tensor once.

    A tied weight has several names. A name that the model itself declares as the tied one
    (``_tied_weights_keys`` of Hugging Face models) is left out; else the first name stays.
    """
    declared = getattr(model, "_tied_weights_keys", None) or ()
    tied = set(declared)
    kept: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state of a module is no weight
        earlier = kept.get(id(tensor))
        if earlier is not None:
            if earlier not in tied or name in tied:
                continue
            del tensors[earlier]
        kept[id(tensor)] = name
        tensors[name] = tensor
    return tensors


def plan_shards(tensors: dict[str, torch.Tensor], max_bytes: int) -> list[list[str]]:
    """Names grouped in order so that each group holds at most ``max_bytes`` (a larger tensor stands alone)."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = full_numel(tensor) * tensor.element_size()
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def host_copies(
    tensors: dict[str, torch.Tensor], shards: list[list[str]], keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """For each group of names the whole tensors in host memory; empty dicts where ``keep`` is false. Collective."""
    for names in shards:
        parameters = [t for name in names if isinstance(t := tensors[name], nn.Parameter)]
        with gathered(parameters), torch.no_grad():
            yield {name: tensors[name].detach().cpu().clone().contiguous() for name in names} if keep else {}

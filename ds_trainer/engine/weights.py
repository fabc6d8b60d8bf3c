"""Reading whole weights out of a (possibly sharded) model, a bounded number of bytes at a time.

Under ZeRO-3 every parameter is spread over a group of ranks; under tensor parallelism a rank holds a slice of it. A
shard's parameters are gathered together, copied to host memory on the main process and let go again, so that no rank
ever holds more than one shard of the model on top of its own part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tensor.repairs import present_if_empty
from ds_trainer.engine.tensor.slices import is_sliced, sliced_layers, whole_shape


def full_numel(parameter: torch.Tensor) -> int:
    """Elements of the whole tensor, also where only a shard is here."""
    if is_sliced(parameter):
        return math.prod(whole_shape(parameter))
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor, also where only a shard is here."""
    if is_sliced(parameter):
        return whole_shape(parameter)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def gathered(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Whole tensors of ``parameters`` inside the context, to be read; nothing to do where they are not sharded.

    Collective over the ranks that hold parts of them.
    """
    layers = sliced_layers(parameters)
    owned = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    held = {id(p): p for p in [*parameters, *owned]}
    sharded = [p for p in held.values() if hasattr(p, "ds_id") and not present_if_empty(p)]
    zero: Any = nullcontext()
    if sharded:
        import deepspeed

        zero = deepspeed.zero.GatheredParameters(sharded)
    with zero:
        slices = [(p, p.data) for p in held.values() if is_sliced(p)]
        for layer in layers:
            layer.gather_params([layer.weight, layer.bias])
        try:
            yield
        finally:
            for parameter, data in slices:
                parameter.data = data


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


def whole_tensors(
    tensors: dict[str, torch.Tensor], names: list[str], max_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of ``names`` with its whole tensor, which is valid until the next one is asked for. Collective.

    Args:
        tensors: what :func:`saved_tensors` gave.
        names: which of them, in this order; the same on all ranks.
        max_bytes: how much is gathered at a time (a larger tensor alone).
    """
    for group in plan_shards({name: tensors[name] for name in names}, max_bytes):
        with gathered([t for name in group if isinstance(t := tensors[name], nn.Parameter)]), torch.no_grad():
            for name in group:
                yield name, tensors[name].detach()


def host_copies(
    tensors: dict[str, torch.Tensor], shards: list[list[str]], keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """For each group of names the whole tensors in host memory; empty dicts where ``keep`` is false. Collective."""
    for names in shards:
        parameters = [t for name in names if isinstance(t := tensors[name], nn.Parameter)]
        with gathered(parameters), torch.no_grad():
            yield {name: tensors[name].detach().cpu().clone().contiguous() for name in names} if keep else {}

"""Gathers full weights from a (possibly sharded) model, a bounded number of bytes at a time.

Under ZeRO-3 every parameter is sharded over a group of ranks; under tensor parallelism a rank holds a slice of it. The
parameters of one weight file are gathered together, copied to host memory on the main process and released, so that no
rank ever holds more than one file's weights in addition to its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.expert_parallel import all_experts, expert_slice, is_expert
from ds_trainer.engine.tensor_parallel.repairs import materialize_if_empty
from ds_trainer.engine.tensor_parallel.slices import is_sliced, sliced_layers, whole_shape

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the weights in each 16-bit precision."""


def is_released(parameter: Any) -> bool:
    """Whether ZeRO 3 holds a part of the parameter on this rank, and its own data is empty at this moment."""
    return hasattr(parameter, "ds_status") and parameter.ds_status.name != "AVAILABLE"


def full_numel(parameter: torch.Tensor) -> int:
    """Number of elements of the full tensor, even if this rank holds only a shard."""
    if (part := expert_slice(parameter)) is not None:
        return math.prod(part.shape)
    if is_sliced(parameter):
        return math.prod(whole_shape(parameter))
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the full tensor, even if this rank holds only a shard."""
    if (part := expert_slice(parameter)) is not None:
        return part.shape
    if is_sliced(parameter):
        return whole_shape(parameter)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def without_adapters(model: Any) -> Any:
    """The model without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") and hasattr(model, "peft_config") else model


@contextmanager
def gathered(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, ``parameters`` are full tensors, for reading. Does nothing for parameters that are not sharded.

    Collective over the ranks that hold their shards.
    """
    layers = sliced_layers(parameters)
    of_layers = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    involved = {id(p): p for p in [*parameters, *of_layers]}
    sharded = [p for p in involved.values() if hasattr(p, "ds_id") and not materialize_if_empty(p)]
    zero: Any = nullcontext()
    if sharded:
        import deepspeed

        zero = deepspeed.zero.GatheredParameters(sharded)
    with zero:
        slices = [(p, p.data) for p in involved.values() if is_sliced(p) or is_expert(p)]
        for layer in layers:
            layer.gather_params([layer.weight, layer.bias])
        for parameter, data in slices:
            if is_expert(parameter):
                parameter.data = all_experts(parameter, data)
        try:
            yield
        finally:
            for parameter, data in slices:
                parameter.data = data


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The contents of a weight file: parameters and persistent buffers by name, each tensor once.

    A tied weight has several names. Names that the model declares as tied (``_tied_weights_keys`` of Hugging Face
    models) are omitted; otherwise the first name is used.
    """
    declared = getattr(model, "_tied_weights_keys", None) or ()
    tied = set(declared)
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # a module's extra state
        earlier = names.get(id(tensor))
        if earlier is not None:
            if earlier not in tied or name in tied:
                continue
            del tensors[earlier]
        names[id(tensor)] = name
        tensors[name] = tensor
    return tensors


def plan_shards(tensors: dict[str, torch.Tensor], max_bytes: int) -> list[list[str]]:
    """Groups the names, in order, so that each group has at most ``max_bytes`` (a larger tensor gets its own group)."""
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
    """Yields each of ``names`` with its full tensor, which is valid until the next iteration. Collective.

    Args:
        tensors: the result of :func:`saved_tensors`.
        names: the names to yield, in this order; the same on all ranks.
        max_bytes: how many bytes are gathered at a time (a larger tensor is gathered alone).
    """
    for group in plan_shards({name: tensors[name] for name in names}, max_bytes):
        with gathered([t for name in group if isinstance(t := tensors[name], nn.Parameter)]), torch.no_grad():
            for name in group:
                yield name, tensors[name].detach()


def host_copies(
    tensors: dict[str, torch.Tensor], shards: list[list[str]], keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields copies of each group's full tensors in host memory; empty dicts if ``keep`` is false. Collective."""
    for names in shards:
        parameters = [t for name in names if isinstance(t := tensors[name], nn.Parameter)]
        with gathered(parameters), torch.no_grad():
            yield {name: tensors[name].detach().cpu().clone().contiguous() for name in names} if keep else {}

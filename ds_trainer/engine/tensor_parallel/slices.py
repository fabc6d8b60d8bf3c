"""Slices of partitioned weights (DeepSpeed's AutoTP), and the gradient norm over them.

AutoTP gives every tensor-parallel rank a slice of some weights and a replica of the others. The gradients of slices
differ on each rank; those of replicated weights are equal on all ranks and must be counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.shard_slices import ShardSlice


def is_sliced(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a slice of ``parameter``, according to DeepSpeed's mark."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def sliced_layers(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """AutoTP's layers that own the partitioned parameters among ``parameters``, each once.

    Each has ``weight``, ``bias`` (or None), and ``gather_params([weight, bias])``, which gathers the full tensors.
    """
    layers: dict[int, Any] = {}
    for parameter in parameters:
        if is_sliced(parameter):
            layer = parameter.gather_params.__self__  # type: ignore[attr-defined]  # AutoTP ties them
            layers.setdefault(id(layer), layer)
    return list(layers.values())


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the full tensor of which this rank holds a slice."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    return tuple(getattr(parameter, DS_AUTOTP_UC_META)["original_shape"])


def tensor_parallel_slice(parameter: torch.Tensor, tp_rank: int) -> ShardSlice:
    """The slice of a partitioned parameter that tensor-parallel rank ``tp_rank`` holds.

    Raises:
        ValueError: DeepSpeed did not record the partitioning (GPT-BigCode, CodeGen and Yuan have special ones).
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    meta = getattr(parameter, DS_AUTOTP_UC_META)
    shape, dim = tuple(meta["logical_shape"]), meta["partition_dim"]
    if meta["sub_param_sizes"] is not None:
        sizes, widths = meta["sub_param_sizes"], meta["sub_param_shard_widths"]
    elif meta["partition_sizes"] is not None:
        sizes, widths = [sum(meta["partition_sizes"])], [meta["partition_sizes"]]
    else:
        raise ValueError(f"DeepSpeed did not record how it partitioned a parameter of shape {shape}")
    bands, first = [], 0
    for size, width in zip(sizes, widths, strict=True):
        bands.append((first + sum(width[:tp_rank]), width[tp_rank]))
        first += size
    empty = ShardSlice(shape, 0, 0, dim, tuple(bands))
    return empty.run(0, empty.slice_numel)


def gradient_norm(parameters: Sequence[nn.Parameter], groups: ParallelGroups) -> torch.Tensor:
    """2-norm of the gradient of the full model: a scalar on its device. Collective over the tensor-parallel group.

    Args:
        parameters: this rank's parameters, with reduced gradients.
        groups: the process groups; partitioned parameters are distributed over ``tp``.
    """
    if groups.layout.ep > 1:
        held = [p for p in parameters if hasattr(p, "ds_trainer_expert_slice")]
        rest = [p for p in parameters if not hasattr(p, "ds_trainer_expert_slice")]
        square = _norm([p.grad for p in held if p.grad is not None]).square().to(parameters[0].device)
        torch.distributed.all_reduce(square, group=groups.experts)
        return (square + _dense_norm(rest, groups).square()).sqrt()
    return _dense_norm(parameters, groups)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Their 2-norm in their dtype, of gradients in 16 bits in float32."""
    if not gradients:
        return torch.zeros(())
    dtype = reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype)))


def _dense_norm(parameters: Sequence[nn.Parameter], groups: ParallelGroups) -> torch.Tensor:
    if groups.layout.tp == 1:
        return _norm([p.grad for p in parameters if p.grad is not None])
    sliced = [p.grad for p in parameters if p.grad is not None and is_sliced(p)]
    replicated = [p.grad for p in parameters if p.grad is not None and not is_sliced(p)]
    square = _norm(sliced).square().to(parameters[0].device)
    replicated_square = _norm(replicated).square().to(square)
    square += replicated_square * 0.0  # propagates a non-finite value on one rank to all ranks
    torch.distributed.all_reduce(square, group=groups.tp)
    return (square + replicated_square).sqrt()

"""What tensor parallelism (DeepSpeed's AutoTP) changes for gradients and weights.

AutoTP gives every tensor-parallel rank a slice of some weights and the whole of the others. The gradients of slices
belong to one rank each; those of whole weights are the same on all of them and must be counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.places import Place


def is_sliced(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a slice of ``parameter``, by DeepSpeed's mark."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def sliced_layers(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """AutoTP's layers that own the sliced ones among ``parameters``, each once.

    Each has ``weight``, ``bias`` (or None), and ``gather_params([weight, bias])`` that puts the whole tensors there.
    """
    found: dict[int, Any] = {}
    for parameter in parameters:
        if is_sliced(parameter):
            layer = parameter.gather_params.__self__  # type: ignore[attr-defined]  # AutoTP ties them
            found.setdefault(id(layer), layer)
    return list(found.values())


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor of which this rank holds a slice."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    return tuple(getattr(parameter, DS_AUTOTP_UC_META)["original_shape"])


def slice_place(parameter: torch.Tensor, tp_rank: int) -> Place:
    """What tensor-parallel rank ``tp_rank`` holds of a sliced parameter.

    Raises:
        ValueError: DeepSpeed does not say how it was cut (GPT-BigCode, CodeGen and Yuan have cuts of their own).
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    meta = getattr(parameter, DS_AUTOTP_UC_META)
    shape, dim = tuple(meta["logical_shape"]), meta["partition_dim"]
    if meta["sub_param_sizes"] is not None:
        sizes, widths = meta["sub_param_sizes"], meta["sub_param_shard_widths"]
    elif meta["partition_sizes"] is not None:
        sizes, widths = [sum(meta["partition_sizes"])], [meta["partition_sizes"]]
    else:
        raise ValueError(f"DeepSpeed does not say how it cut a parameter of shape {shape}")
    bands, first = [], 0
    for size, width in zip(sizes, widths, strict=True):
        bands.append((first + sum(width[:tp_rank]), width[tp_rank]))
        first += size
    whole = Place(shape, 0, 0, dim, tuple(bands))
    return whole.run(0, whole.slice_numel)


def gradient_norm(parameters: Sequence[nn.Parameter], groups: ParallelGroups) -> torch.Tensor:
    """2-norm of the gradients of the whole model: a scalar on their device. Collective over the tensor group.

    Args:
        parameters: what this rank holds, with reduced gradients.
        groups: whose ``tp`` group shares the sliced ones.
    """
    whole = [p.grad for p in parameters if p.grad is not None]
    if groups.layout.tp == 1:
        return torch.nn.utils.get_total_norm(whole)
    sliced = [p.grad for p in parameters if p.grad is not None and is_sliced(p)]
    whole = [p.grad for p in parameters if p.grad is not None and not is_sliced(p)]
    square = torch.nn.utils.get_total_norm(sliced).square().to(parameters[0].device)
    once = torch.nn.utils.get_total_norm(whole).square().to(square)
    square += once * 0.0  # what is not finite on one rank is so for all of them
    torch.distributed.all_reduce(square, group=groups.tp)
    return (square + once).sqrt()

"""Expert parallelism: the ranks that see different tokens hold different experts of a mixture.

Of a model of transformers only the function that computes its experts is replaced (``ALL_EXPERTS_FUNCTIONS``):
router, shared experts, names and auxiliary losses stay its own. The stacked weights of the experts,
``[experts, ...]``, are divided along their first dimension, and their adapters along the one that has the experts.
DeepSpeed (0.19.8) knows by the marks of its own mixtures that such a weight is replicated over some of the ranks only,
and reduces, shards and broadcasts it there; gradients are divided by the number of all ranks at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, all_gather_into_tensor

from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.shard_slices import ShardSlice

EXPERTS = "ds_trainer_experts"
"""DeepSpeed's name of the ranks that divide experts, and of parameter groups of experts."""

_SLICE = "ds_trainer_expert_slice"
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")  # of the schedules of torch
_DIVIDED_FROM = "ds_trainer_divided_from"  # a key of a parameter group: the index of the other part
EXPERT_MARKS = ("moe", "name", _DIVIDED_FROM)
"""Keys that are set in parameter groups of experts, two of them for DeepSpeed."""


def expert_slice(parameter: torch.Tensor) -> ShardSlice | None:
    """The slice of a stacked weight of experts that this rank holds; None for any other parameter."""
    return getattr(parameter, _SLICE, None)


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of the experts of ``parameter``."""
    return hasattr(parameter, _SLICE)


def has_foreign_experts(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some of ``parameters`` are experts of DeepSpeed's own expert parallelism."""
    return any(not getattr(parameter, "allreduce", True) and not is_expert(parameter) for parameter in parameters)


def all_experts(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """The stacked weight ``parameter`` with all experts, of which this rank has ``part``. Collective."""
    of, group = getattr(parameter, _SLICE), parameter.ds_trainer_expert_ranks
    parts = part.new_empty(group.size() * part.numel())
    all_gather_into_tensor(parts, part.reshape(-1), group=group)
    bands = parts.view(group.size(), *of.shape[: of.dim], len(of.bands), -1, *of.shape[of.dim + 1 :])
    return bands.movedim(0, of.dim + 1).reshape(of.shape)


def weight_group(parameter: torch.Tensor, groups: ParallelGroups) -> ProcessGroup:
    """The ranks that hold the same elements of ``parameter``, or its shards."""
    return groups.expert_replicas if is_expert(parameter) else groups.seq_data_parallel


def mark_experts(parameter: Any, groups: ParallelGroups, dim: int = 0, repeats: int = 1) -> None:
    """Leaves this rank its part of ``parameter``, the weights of all experts.

    Args:
        parameter: the weights.
        groups: the groups of this job.
        dim: the dimension along which the experts are stacked.
        repeats: how often all of them follow each other along it.
    """
    rank, ranks = groups.experts.rank(), groups.layout.ep
    width = parameter.shape[dim] // (ranks * repeats)
    bands = tuple(((repeat * ranks + rank) * width, width) for repeat in range(repeats))
    part = ShardSlice(tuple(parameter.shape), 0, 0, dim, bands)
    setattr(parameter, _SLICE, part.run(0, part.slice_numel))
    held = parameter.data.unflatten(dim, (repeats, ranks, width)).select(dim + 1, rank)
    parameter.data = held.reshape(part.slice_shape).clone()
    # DeepSpeed's marks: replicated over the ranks of a group of this name only, and not over all.
    parameter.allreduce = False
    parameter.group_name = parameter.ds_zero_partition_group_name = EXPERTS
    parameter.ds_zero_placement_family = "autoep_expert"
    parameter.ds_zero_partition_process_group = groups.expert_replicas
    parameter.ds_trainer_expert_ranks = groups.experts


def separate_experts(groups: list[dict[str, Any]], schedule: Any = None) -> list[dict[str, Any]]:
    """Divides each parameter group of ``groups`` that has experts and other parameters, and drops empty ones, in place.

    DeepSpeed shards a group of parameters over one group of ranks. It drops empty groups, too, but not the values that
    a schedule keeps for them: those of later groups would be taken from the group before.

    Args:
        groups: parameter groups of an optimizer.
        schedule: the schedule of that optimizer, which keeps a value for each group; None if there is none yet.

    Returns:
        ``groups``.
    """
    empty = [index for index, group in enumerate(groups) if not group["params"]]
    by_group: list[Any] = [groups, *(getattr(schedule, name, None) for name in _BY_GROUP)]
    for values in by_group:
        for index in reversed(empty if isinstance(values, list) else ()):
            del values[index]
    for index, group in enumerate(list(groups)):
        experts = [parameter for parameter in group["params"] if is_expert(parameter)]
        if not experts:
            continue
        rest = [parameter for parameter in group["params"] if not is_expert(parameter)]
        marks = {"moe": True, "name": EXPERTS}
        if rest:
            group["params"] = rest
            groups.append({**group, "params": experts, **marks, _DIVIDED_FROM: index})
            for name in _BY_GROUP:
                if isinstance(values := getattr(schedule, name, None), list):
                    values.append(values[index])
        else:
            group.update(marks)
    return groups


def of_whole_groups(values: Sequence[Any], groups: list[dict[str, Any]]) -> list[Any]:
    """``values``, one for each of ``groups``, without those of the groups that :func:`separate_experts` has added.

    So a checkpoint does not depend on the number of ranks that divide the experts.
    """
    return [value for value, group in zip(values, groups, strict=True) if _DIVIDED_FROM not in group]


def of_divided_groups(values: Sequence[Any], groups: list[dict[str, Any]]) -> list[Any]:
    """The inverse of :func:`of_whole_groups`: an added group has the value of the group that it was taken from."""
    return [*values, *(values[group[_DIVIDED_FROM]] for group in groups if _DIVIDED_FROM in group)]


def schedule_state(state: Any, groups: list[dict[str, Any]], convert: Callable[..., list[Any]]) -> Any:
    """The ``state_dict`` of a schedule with its values for each parameter group converted."""
    if isinstance(state, dict):
        changed = {key: schedule_state(value, groups, convert) for key, value in state.items()}
        return {k: convert(v, groups) if k in _BY_GROUP and isinstance(v, list) else v for k, v in changed.items()}
    return [schedule_state(one, groups, convert) for one in state] if isinstance(state, list) else state


def has_trained_experts(model: nn.Module) -> bool:
    """Whether this rank trains a part of the experts. Frozen ones are in no group of parameters."""
    return any(is_expert(parameter) and parameter.requires_grad for parameter in model.parameters())

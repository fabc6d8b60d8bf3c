"""Gathers the results of one micro-step of an evaluation on every rank, in the dataset's order.

A micro-step is one batch of each replica; its samples are in the order of the replicas
(:mod:`ds_trainer.parallel.batch_plan`). Batches may have different sizes, and a replica may have a dummy, which does
not count. So ranks first exchange the shapes if these differ, and then send their tensors as bytes in one collective.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.nested import concatenate, leaves_of, map_leaves
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

_ALIGNMENT = 16  # bytes; suits tensors of every dtype
_REMEDY = "Name such outputs in ignore_keys, or set eval_use_gather_object=True."


class _Part(NamedTuple):
    """Description of one rank's tree: its structure with numbers of dimensions for tensors, their shapes; or a
    problem.
    """

    dummy: bool
    structure: Any
    tensors: list[tuple[tuple[int, ...], torch.dtype]]
    problem: str | None


def gather_micro_steps(tree: Any, dummy: bool, layout: ParallelLayout, as_objects: bool = False) -> Any:
    """Concatenate the trees of all replicas along the first dimension. Collective.

    Args:
        tree: tensors in tuples, lists and dicts; of equal structure on all ranks.
        dummy: whether this rank's batch is a dummy, which does not count.
        layout: the parallel layout; the first rank of each replica contributes.
        as_objects: leaves may be any objects; they are pickled and returned on the host, and lists are sequences of
            samples (:func:`ds_trainer.training.evaluation.nested.concatenate`).

    Raises:
        ConfigError: on all ranks, if outputs differ in structure or are not tensors.
    """
    if as_objects:
        everything = distributed.gather_objects((dummy, map_leaves(_to_host, tree)))
        trees = [everything[rank][1] for rank in layout.replica_leaders if not everything[rank][0]]
        return _concatenate(trees, samples_in_lists=True)
    parts = _parts_of_all(_describe(tree, dummy))
    problem = next((part.problem for part in parts if part.problem), None)
    if problem:
        raise ConfigError(problem)
    sources = [rank for rank in layout.replica_leaders if not parts[rank].dummy]
    template = parts[sources[0]].structure
    if any(parts[rank].structure != template for rank in sources):
        raise ConfigError(
            "The outputs of an evaluation differ in structure between ranks; as numbers of dimensions: "
            f"{' and '.join(sorted({str(parts[rank].structure) for rank in sources}))}. {_REMEDY}"
        )
    if distributed.world_size() == 1:
        return _concatenate([tree])
    received = _exchange(leaves_of(tree), [parts[rank] for rank in layout.replica_leaders], parallel_groups(layout))
    pairs = zip(layout.replica_leaders, received, strict=True)
    # Its own structure: dicts are equal whatever the order of their keys, in which a rank sends its tensors.
    return _concatenate([_filled(parts[rank].structure, tensors) for rank, tensors in pairs if rank in sources])


def _parts_of_all(part: _Part) -> list[_Part]:
    """The descriptions of all ranks. Collective.

    Usually they are equal, or equal but for sizes: that is one vote, or a vote and a few numbers of each rank.
    """
    forms = part._replace(dummy=False, tensors=[((len(shape),), dtype) for shape, dtype in part.tensors])
    same, same_form = distributed.alike_each(repr(part), repr(forms))
    if same:
        return [part] * distributed.world_size()
    if not same_form:
        return distributed.gather_objects(part)
    sizes = [int(part.dummy), *(size for shape, _ in part.tensors for size in shape)]
    parts = []
    for dummy, *numbers in distributed.gather_numbers(torch.tensor(sizes)).tolist():
        left = iter(numbers)
        tensors = [(tuple(itertools.islice(left, len(shape))), dtype) for shape, dtype in part.tensors]
        parts.append(part._replace(dummy=bool(dummy), tensors=tensors))
    return parts


def _describe(tree: Any, dummy: bool) -> _Part:
    leaves = leaves_of(tree)
    wrong = next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)), None)
    if wrong is not None:
        problem = f"An output, label or input of evaluation is a {wrong}, which cannot be gathered. {_REMEDY}"
        return _Part(dummy, None, [], problem)
    return _Part(
        dummy, map_leaves(lambda leaf: leaf.dim(), tree), [(tuple(leaf.shape), leaf.dtype) for leaf in leaves], None
    )


def _exchange(leaves: list[torch.Tensor], parts: list[_Part], groups: ParallelGroups) -> list[list[torch.Tensor]]:
    """The tensors of the first rank of every replica; sent as bytes, so that the dtype does not matter.

    The replica leaders gather and then broadcast to their replica: a rank receives every tensor once, and all ranks
    have the same bits.
    """
    sizes = [sum(_padded_size(shape, dtype) for shape, dtype in part.tensors) for part in parts]
    device = distributed.collective_device()
    local = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    start = 0
    for leaf in leaves:
        flat = leaf.detach().to(device).contiguous().view(-1).view(torch.uint8)
        local[start : start + flat.numel()] = flat
        start += _padded_size(tuple(leaf.shape), leaf.dtype)
    everything = local.new_empty(len(parts) * local.numel())
    layout, rank = groups.layout, distributed.rank()
    if layout.is_replica_leader(rank):
        if layout.dp > 1:
            dist.all_gather_into_tensor(everything, local, group=groups.dp)
        else:
            everything = local
    if layout.replica_size > 1:
        dist.broadcast(everything, layout.rank_at(dp=groups.coordinates.dp), group=groups.replica)
    received = []
    for index, part in enumerate(parts):
        start, tensors = index * local.numel(), []
        for shape, dtype in part.tensors:
            numel = _numel(shape)
            size = numel * dtype.itemsize
            tensors.append(everything[start : start + size].view(dtype).view(shape))
            start += _padded_size(shape, dtype)
        received.append(tensors)
    return received


def _filled(template: Any, tensors: list[torch.Tensor]) -> Any:
    waiting = iter(tensors)
    return map_leaves(lambda leaf: next(waiting), template)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _padded_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_numel(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _concatenate(trees: list[Any], samples_in_lists: bool = False) -> Any:
    try:
        return concatenate(trees, samples_in_lists)
    except TypeError as error:
        raise ConfigError(f"The outputs of the ranks cannot be concatenated: {error}. {_REMEDY}") from error

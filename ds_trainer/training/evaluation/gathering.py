"""What all ranks computed in one round of an evaluation, on every rank, in the dataset's order.

A round is one batch of each replica; the samples of a round follow one another in the order of the replicas
(:mod:`ds_trainer.parallel.batch_plan`). Batches may be ragged, and a replica may have a filler that counts for
nothing. So ranks first tell each other the shapes, and then send their tensors as bytes in one collective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.nested import joined, leaves_of, map_leaves
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

_ALIGNMENT = 16  # bytes; tensors of every dtype can begin there
_REMEDY = "Name such outputs in ignore_keys, or set eval_use_gather_object=True."


class _Part(NamedTuple):
    """What one rank has: its tree with numbers of dimensions for tensors, and their shapes; or what is wrong."""

    filler: bool
    structure: Any
    tensors: list[tuple[tuple[int, ...], torch.dtype]]
    problem: str | None


def gather_rounds(tree: Any, filler: bool, layout: ParallelLayout, as_objects: bool = False) -> Any:
    """The trees of all replicas as one, joined along the first dimension. Collective.

    Args:
        tree: tensors in tuples, lists and dicts; of equal structure on all ranks.
        filler: this rank's batch counts for nothing.
        layout: where every rank stands; one rank of each replica is taken.
        as_objects: leaves may be any objects; they are pickled and come back on the host, and lists are sequences of
            samples (:func:`ds_trainer.training.evaluation.nested.joined`).

    Raises:
        ConfigError: ranks have outputs of different structure, or that are no tensors; on all ranks alike.
    """
    if as_objects:
        everything = distributed.gather_objects((filler, map_leaves(_to_host, tree)))
        trees = [everything[rank][1] for rank in layout.speakers if not everything[rank][0]]
        return _joined(trees, samples_in_lists=True)
    parts = distributed.gather_objects(_describe(tree, filler))
    problem = next((part.problem for part in parts if part.problem), None)
    if problem:
        raise ConfigError(problem)
    speaking = [rank for rank in layout.speakers if not parts[rank].filler]
    template = parts[speaking[0]].structure
    if any(parts[rank].structure != template for rank in speaking):
        raise ConfigError(
            "The ranks have outputs of different structure in one round of evaluation; as numbers of dimensions: "
            f"{' and '.join(sorted({str(parts[rank].structure) for rank in speaking}))}. {_REMEDY}"
        )
    if distributed.world_size() == 1:
        return _joined([tree])
    received = _exchange(leaves_of(tree), [parts[rank] for rank in layout.speakers], parallel_groups(layout))
    pairs = zip(layout.speakers, received, strict=True)
    return _joined([_filled(template, tensors) for rank, tensors in pairs if rank in speaking])


def _describe(tree: Any, filler: bool) -> _Part:
    leaves = leaves_of(tree)
    wrong = next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)), None)
    if wrong is not None:
        problem = f"An output, label or input of evaluation is a {wrong}, which cannot be gathered. {_REMEDY}"
        return _Part(filler, None, [], problem)
    return _Part(
        filler, map_leaves(lambda leaf: leaf.dim(), tree), [(tuple(leaf.shape), leaf.dtype) for leaf in leaves], None
    )


def _exchange(leaves: list[torch.Tensor], parts: list[_Part], groups: ParallelGroups) -> list[list[torch.Tensor]]:
    """The tensors of one rank of every replica; in bytes, so that the dtype does not matter.

    Those ranks gather from each other and then tell their replica: a rank receives no tensor more than once, and all
    ranks have the same bits.
    """
    sizes = [sum(_room(shape, dtype) for shape, dtype in part.tensors) for part in parts]
    device = distributed.collective_device()
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    start = 0
    for leaf in leaves:
        flat = leaf.detach().to(device).contiguous().view(-1).view(torch.uint8)
        mine[start : start + flat.numel()] = flat
        start += _room(tuple(leaf.shape), leaf.dtype)
    everything = mine.new_empty(len(parts) * mine.numel())
    layout, rank = groups.layout, distributed.rank()
    if layout.speaks(rank):
        if layout.dp > 1:
            dist.all_gather_into_tensor(everything, mine, group=groups.dp)
        else:
            everything = mine
    if layout.replica_size > 1:
        dist.broadcast(everything, layout.rank_at(dp=groups.place.dp), group=groups.replica)
    received = []
    for place, part in enumerate(parts):
        start, tensors = place * mine.numel(), []
        for shape, dtype in part.tensors:
            numel = _numel(shape)
            size = numel * dtype.itemsize
            tensors.append(everything[start : start + size].view(dtype).view(shape))
            start += _room(shape, dtype)
        received.append(tensors)
    return received


def _filled(template: Any, tensors: list[torch.Tensor]) -> Any:
    waiting = iter(tensors)
    return map_leaves(lambda leaf: next(waiting), template)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_numel(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _joined(trees: list[Any], samples_in_lists: bool = False) -> Any:
    try:
        return joined(trees, samples_in_lists)
    except TypeError as error:
        raise ConfigError(f"The outputs of the ranks cannot be joined: {error}. {_REMEDY}") from error

"""Unshards the outputs of a model for a batch that is sharded along its sequences.

Outputs per token are concatenated in the order of the sequence, without the padding at its end. Outputs per sample must
be equal on all ranks: a rank has seen only its shard of the sequence, and an output computed from that alone (a pooled
vector, a class from the last token) is not an output for the whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.data.sequence_sharding import unshard
from ds_trainer.parallel.attention import ActiveSharding
from ds_trainer.training.evaluation.nested import map_leaves
from ds_trainer.utils.errors import ConfigError

_REMEDY = "Name it in ignore_keys, or set context_parallel_size and sequence_parallel_size to 1."


def unshard_outputs(tree: Any, sharding: ActiveSharding, rows: int, length: int) -> Any:
    """Unshard the outputs ``tree`` of the ranks of a sequence group. Collective over the group.

    Args:
        tree: tensors in tuples, lists and dicts, with equal shapes on all ranks; other leaves are returned unchanged.
        sharding: the sharding of the batch.
        rows: samples in the batch.
        length: tokens per sample, before padding.

    Returns:
        Tensors ``[rows, tokens of a rank, ...]`` become ``[rows, length, ...]``; others are those of the first rank.

    Raises:
        ConfigError: an output is neither per token nor equal on all ranks, or could be both.
    """
    return map_leaves(
        lambda leaf: _whole(leaf, sharding, rows, length) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _whole(output: torch.Tensor, sharding: ActiveSharding, rows: int, length: int) -> torch.Tensor:
    parts = _of_all_ranks(output, sharding)
    shape, local = list(output.shape), sharding.local_length
    equal = all(torch.equal(part, parts[0]) for part in parts[1:])
    described = f"An output of shape {shape}, for a batch of {rows} sequences with {local} tokens per rank,"
    if shape[:2] == [rows, local]:
        if equal and len(shape) == 2 and output.is_floating_point():
            raise ConfigError(
                f"{described} is equal on all ranks: it may have one number per token or {local} per sample. {_REMEDY}"
            )
        return unshard(parts, sharding.plan, length)
    if local in shape[2:] or not all(torch.allclose(part, parts[0], equal_nan=True) for part in parts[1:]):
        raise ConfigError(
            f"{described} differs between the ranks, but is not per token ([{rows}, {local}, ...]): it cannot be "
            f"unsharded. {_REMEDY}"
        )
    return parts[0]


def _of_all_ranks(output: torch.Tensor, sharding: ActiveSharding) -> list[torch.Tensor]:
    """``output`` of each rank of the sequence group; sent as bytes, so that the dtype does not matter."""
    local = output.detach().contiguous().view(-1).view(torch.uint8)
    received = [torch.empty_like(local) for _ in range(sharding.groups.sequence.size())]
    dist.all_gather(received, local, group=sharding.groups.sequence)
    return [part.view(output.dtype).view(output.shape) for part in received]

"""What a model made of the parts of a batch that is cut along its sequences, as one process would have made it.

Outputs for each token are laid together in the order of the sequence, without the filling at its end. What belongs to a
sample must be the same on all ranks: a rank has seen its part of the sequence only, and what it makes of that alone (a
pooled vector, a class read off the last token) is no output of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.data.sequence_cut import join
from ds_trainer.parallel.attention import RunningCut
from ds_trainer.training.evaluation.nested import map_leaves
from ds_trainer.utils.errors import ConfigError

_REMEDY = "Name it in ignore_keys, or set context_parallel_size and sequence_parallel_size to 1."


def rejoined(tree: Any, cut: RunningCut, rows: int, length: int) -> Any:
    """The outputs ``tree`` of the ranks of a sequence group as those of the whole batch. Collective over the group.

    Args:
        tree: tensors in tuples, lists and dicts, of equal shapes on all ranks; anything else stays.
        cut: of the batch.
        rows: samples of the batch.
        length: tokens of each, before they were filled up.

    Returns:
        Tensors ``[rows, tokens of a rank, ...]`` as ``[rows, length, ...]``; others as they are on the first rank.

    Raises:
        ConfigError: an output is neither for each token nor the same on all ranks, or could be both.
    """
    return map_leaves(lambda leaf: _whole(leaf, cut, rows, length) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _whole(output: torch.Tensor, cut: RunningCut, rows: int, length: int) -> torch.Tensor:
    parts = _of_all_ranks(output, cut)
    shape, local = list(output.shape), cut.local_length
    equal = all(torch.equal(part, parts[0]) for part in parts[1:])
    described = f"An output of the shape {shape}, of a batch of {rows} sequences of which a rank has {local} tokens,"
    if shape[:2] == [rows, local]:
        if equal and len(shape) == 2 and output.is_floating_point():
            raise ConfigError(
                f"{described} is the same on all ranks: whether it has a number for each token or {local} for each "
                f"sample cannot be told. {_REMEDY}"
            )
        return join(parts, cut.plan, length)
    if local in shape[2:] or not all(torch.allclose(part, parts[0], equal_nan=True) for part in parts[1:]):
        raise ConfigError(
            f"{described} differs between the ranks, but is not for each token ([{rows}, {local}, ...]): it cannot be "
            f"put together. {_REMEDY}"
        )
    return parts[0]


def _of_all_ranks(output: torch.Tensor, cut: RunningCut) -> list[torch.Tensor]:
    """``output`` of each rank of the sequence group; sent as bytes, so that the dtype does not matter."""
    mine = output.detach().contiguous().view(-1).view(torch.uint8)
    received = [torch.empty_like(mine) for _ in range(cut.groups.sequence.size())]
    dist.all_gather(received, mine, group=cut.groups.sequence)
    return [part.view(output.dtype).view(output.shape) for part in received]

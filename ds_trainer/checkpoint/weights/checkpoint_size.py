"""Computes the size of a checkpoint before it is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile
from ds_trainer.checkpoint.shards.frozen_weights import FrozenContent
from ds_trainer.checkpoint.shards.model_plan import ModelPlan
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.checkpoint.shards.shard_file import plan_shard_file
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT
from ds_trainer.utils import distributed


class CheckpointSize(NamedTuple):
    """Bytes of one checkpoint, over all ranks.

    Attributes:
        weights: model weights, master weights, and everything that is not optimizer state.
        states: optimizer states.
        frozen: the part of ``weights`` that only the first checkpoint writes and later ones link to.
    """

    weights: int
    states: int
    frozen: int

    @property
    def total(self) -> int:
        """Bytes of a single checkpoint."""
        return self.weights + self.states

    def of(self, count: int) -> int:
        """Returns the bytes of ``count`` checkpoints in one directory."""
        return self.frozen + count * (self.total - self.frozen)


def checkpoint_size(
    contents: Iterable[CheckpointFile], model: ModelPlan | None, other_bytes: int = 0
) -> CheckpointSize:
    """Returns the size of the engine's checkpoint files on all ranks. Collective.

    Args:
        contents: this rank's files; their tensors are not read.
        model: the plan of the model's weight files in the checkpoint; the same on all ranks.
        other_bytes: bytes of this rank's other files.
    """
    weights, states, frozen = other_bytes, 0, 0
    for content in contents:
        if not isinstance(content, ShardContent):
            continue
        arranged = plan_shard_file(content.shards, content.scalars, content.locate)
        size = len(arranged.header) + arranged.written
        state_bytes = sum(p.tensor.nbytes for p in content.shards if p.kind not in (MASTER, WEIGHT, BUFFER))
        weights, states = weights + size - state_bytes, states + state_bytes
        frozen += size if isinstance(content, FrozenContent) else 0
    sizes = torch.tensor([weights, states, frozen], device=distributed.collective_device())
    if distributed.world_size() > 1:
        distributed.all_reduce_sum(sizes)
    weights, states, frozen = (int(size) for size in sizes.tolist())
    for file in model.files if model is not None else ():
        weights += file.size
        frozen += file.size if model is not None and file.name in model.frozen else 0
    return CheckpointSize(weights, states, frozen)

"""The model's files in a checkpoint: which safetensors files there are, and where each tensor is stored in them.

All ranks compute the same plan, so each can write its own elements in place, from the same copy of the state that its
shards are written from. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT, StateShard


class TensorLocation(NamedTuple):
    """Where a whole tensor is stored: ``offset`` bytes from the beginning of ``file``."""

    file: str
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelPlan:
    """The weight files of one model.

    Attributes:
        files: with their headers.
        index: the index file that ``from_pretrained`` reads first; None for a single weight file.
        tensors: by the name of their shards.
        max_bytes: maximum size of one file.
        frozen: names of the files that hold nothing but frozen weights.
    """

    files: Sequence[SharedFile]
    index: InMemoryFile | None
    tensors: dict[str, TensorLocation]
    max_bytes: int
    frozen: frozenset[str] = frozenset()

    def stored(self, shard: StateShard, is_writer: bool) -> TensorLocation | None:
        """Returns where the model's files hold the elements of ``shard``; None if this rank does not write them there.

        Args:
            shard: a part of the engine's state.
            is_writer: whether this rank writes the buffers, of which every rank has a full copy.
        """
        kinds: Collection[str] = (MASTER, WEIGHT, BUFFER) if is_writer else (MASTER, WEIGHT)
        return self.tensors.get(shard.name) if shard.kind in kinds else None

"""Shards of tensors as a checkpoint file, and as a part of the model's files in the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch

from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.checkpoint.shards.in_place import InPlaceWrite, write_in_place
from ds_trainer.checkpoint.shards.shard_file import LocateInModel, not_in_model, plan_shard_file, write_shard_file
from ds_trainer.engine.state.state_shards import StateShard


@dataclass(frozen=True)
class ShardContent:
    """Shards of tensors. They are views of the engine's state: the next step changes them.

    Attributes:
        name: of the file.
        shards: the tensors.
        scalars: single-value states of parameters: ``{parameter: {key: value}}``.
        locate: tells where the model's files hold the elements of a shard.
    """

    name: str
    shards: Sequence[StateShard]
    scalars: Mapping[str, Mapping[str, Any]]
    locate: LocateInModel = not_in_model

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        write_shard_file(stream, self.shards, self.scalars, self.locate)

    def write_shared(self, files: SharedFiles) -> None:
        """Write the elements that shared files hold."""
        in_model = plan_shard_file(self.shards, {}, self.locate).in_model
        writes = [InPlaceWrite(stored, shard.slice, partial(_elements, shard)) for stored, shard, _ in in_model]
        write_in_place(files, writes)


def _elements(shard: StateShard, start: int, stop: int) -> torch.Tensor:
    return shard.tensor.detach().reshape(-1)[start:stop]

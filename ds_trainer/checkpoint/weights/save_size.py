"""How many bytes a checkpoint takes, counted from what will be written, before it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.file import arrange
from ds_trainer.checkpoint.pieces.frozen import FrozenContent
from ds_trainer.checkpoint.pieces.model_plan import ModelPlan
from ds_trainer.checkpoint.protocol.contents import Content
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT
from ds_trainer.utils import distributed


class SaveSize(NamedTuple):
    """Bytes of a checkpoint of all ranks.

    Attributes:
        weights: of the model, of masters and of all that is neither.
        states: of the optimizer.
        frozen: of ``weights``, those that only the first checkpoint writes, and the others link to.
    """

    weights: int
    states: int
    frozen: int

    @property
    def total(self) -> int:
        """Of one checkpoint alone."""
        return self.weights + self.states

    def of(self, count: int) -> int:
        """Of ``count`` checkpoints in one directory."""
        return self.frozen + count * (self.total - self.frozen)


def size_of_save(contents: Iterable[Content], model: ModelPlan | None, beside: int = 0) -> SaveSize:
    """What :func:`~ds_trainer.checkpoint.pieces.engine_files.engine_contents` of all ranks takes. Collective.

    Args:
        contents: this rank's; their tensors are not read.
        model: the files by which a checkpoint is a model too; alike on all ranks.
        beside: bytes of this rank's other files.
    """
    weights, states, frozen = beside, 0, 0
    for content in contents:
        if not isinstance(content, PiecesContent):
            continue
        arranged = arrange(content.pieces, content.scalars, content.stored)
        size = len(arranged.head) + arranged.written
        of_states = sum(p.tensor.nbytes for p in content.pieces if p.kind not in (MASTER, WEIGHT, BUFFER))
        weights, states = weights + size - of_states, states + of_states
        frozen += size if isinstance(content, FrozenContent) else 0
    own = torch.tensor([weights, states, frozen], device=distributed.collective_device())
    if distributed.world_size() > 1:
        distributed.all_reduce_sum(own)
    weights, states, frozen = (int(size) for size in own.tolist())
    for file in model.files if model is not None else ():
        weights += file.size
        frozen += file.size if model is not None and file.name in model.frozen else 0
    return SaveSize(weights, states, frozen)

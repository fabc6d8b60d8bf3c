"""The model in a checkpoint: which safetensors files there are, and where in them each tensor lies.

All ranks plan alike, so each writes its own elements in place, out of the same copy of the state that its pieces are
written from: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Piece


class StoredTensor(NamedTuple):
    """Where a whole tensor lies: ``offset`` bytes from the beginning of ``file``."""

    file: str
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelPlan:
    """The weight files of one model.

    Attributes:
        files: with their headers.
        index: what ``from_pretrained`` reads first; None where there is one file.
        tensors: by the name of their pieces.
        max_bytes: largest size of one file.
        frozen: names of files that hold nothing but weights that stay as they are.
    """

    files: Sequence[SharedFile]
    index: Held | None
    tensors: dict[str, StoredTensor]
    max_bytes: int
    frozen: frozenset[str] = frozenset()

    def stored(self, piece: Piece, speaks: bool) -> StoredTensor | None:
        """Where the elements of ``piece`` lie in the model; None where this rank does not write them there.

        Args:
            piece: any of the engine's.
            speaks: this rank writes the buffers, of which every rank has its own.
        """
        kinds: Collection[str] = (MASTER, WEIGHT, BUFFER) if speaks else (MASTER, WEIGHT)
        return self.tensors.get(piece.name) if piece.kind in kinds else None

"""Pieces of tensors as a file of a checkpoint, and as a part of the model beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch

from ds_trainer.checkpoint.pieces.file import Stored, arrange, not_stored, write_pieces_file
from ds_trainer.checkpoint.pieces.in_place import InPlace, write_in_place
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.engine.state.pieces import Piece


@dataclass(frozen=True)
class PiecesContent:
    """Pieces of tensors. They are the engine's own: the next step changes them.

    Attributes:
        stored: of which pieces the model's files hold the elements.
    """

    name: str
    pieces: Sequence[Piece]
    scalars: Mapping[str, Mapping[str, Any]]
    stored: Stored = not_stored

    def write(self, stream: BinaryIO) -> None:
        write_pieces_file(stream, self.pieces, self.scalars, self.stored)

    def write_shared(self, files: SharedFiles) -> None:
        parts = arrange(self.pieces, {}, self.stored).in_model
        write_in_place(files, [InPlace(stored, piece.place, partial(_elements, piece)) for stored, piece, _ in parts])


def _elements(piece: Piece, start: int, stop: int) -> torch.Tensor:
    return piece.tensor.detach().reshape(-1)[start:stop]

"""Pieces of tensors as a file of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ds_trainer.checkpoint.pieces.file import write_pieces_file
from ds_trainer.engine.state.pieces import Piece


@dataclass(frozen=True)
class PiecesContent:
    """Pieces of tensors. They are the engine's own: the next step changes them."""

    name: str
    pieces: Sequence[Piece]
    scalars: Mapping[str, Mapping[str, Any]]

    def write(self, stream: BinaryIO) -> None:
        write_pieces_file(stream, self.pieces, self.scalars)

"""Weights that no optimizer steps: written by the first save, linked to by the next ones while they do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.file import arrange
from ds_trainer.checkpoint.protocol.contents import Content, Unchanged
from ds_trainer.checkpoint.protocol.files import FileRecord, Stored
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.engine.state.pieces import Piece, frozen_names
from ds_trainer.engine.state.units import UnknownState
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils import distributed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FrozenContent(PiecesContent):
    """Pieces of frozen weights. A copy of them is needed until they are written, and not for the next save."""


@dataclass(frozen=True)
class _AsBefore:
    """Frozen weights read from the engine while they are written: only where they cannot be linked to.

    Writing raises RuntimeError where they are not those of ``sum_before`` any more.
    """

    frozen: FrozenContent
    sum_before: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.frozen.name

    def write(self, stream: BinaryIO) -> None:
        self.frozen.write(stream)
        self._check()

    def write_shared(self, files: SharedFiles) -> None:
        self.frozen.write_shared(files)
        self._check()

    def _check(self) -> None:
        if sum_of(self.frozen.pieces) != self.sum_before:
            raise RuntimeError(f"{self.name}: weights that no optimizer steps were changed while they were written")


class FrozenFiles:
    """Knows which weights stay as they are, and in which checkpoint they lie on the disk. One for a training.

    Args:
        names: of parameters that are not trained; alike on all ranks.
    """

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.names = names
        self._checkpoint: Path | None = None
        self._records: dict[str, FileRecord] = {}
        self._sum: tuple[int, ...] = ()  # of what is stored, or of what is being written
        self._unchanged = False

    @classmethod
    def of(cls, engine: TrainingEngine) -> FrozenFiles:
        """For a training that begins; without names where only DeepSpeed knows the engine's state."""
        try:
            return cls(frozen_names(engine))
        except UnknownState:
            return cls()

    def content(self, frozen: FrozenContent) -> Content:
        """What is written of this rank's part: nothing but a link where it is stored already. Collective.

        It takes one pass over the weights on their device, and one wait.
        """
        found = sum_of(frozen.pieces)
        changed = self._checkpoint is None or found != self._sum
        self._unchanged = not distributed.agree(torch.tensor([int(changed)]))[0]
        self._sum = found
        if not self._unchanged:
            self._checkpoint = None
            return frozen
        as_before = _AsBefore(frozen, found)
        stored = None if arrange(frozen.pieces, {}, frozen.stored).in_model else self.stored(frozen.name)
        return Unchanged(as_before, stored)

    def stored(self, name: str, head: bytes = b"") -> Stored | None:
        """Where a file of frozen weights lies already that is to be written now; None where it has changed.

        Args:
            name: of the file.
            head: its first bytes, which the stored one must have.
        """
        if not self._unchanged or self._checkpoint is None or name not in self._records:
            return None
        return Stored(self._checkpoint / name, self._records[name], head)

    def committed(self, checkpoint: Path, records: Iterable[FileRecord]) -> None:
        """What :meth:`content` gave last is in this checkpoint; ``records`` are of the files that this rank knows."""
        self._checkpoint, self._records = checkpoint, {record.name: record for record in records}

    def loaded(self, checkpoint: Path, records: Iterable[FileRecord], pieces: Sequence[Piece]) -> None:
        """``pieces`` were read from this checkpoint, by ranks in whatever layout."""
        self.committed(checkpoint, records)
        self._sum = sum_of(pieces)


def sum_of(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Of each piece the sum of its elements as integers of their size, mod 2**64: another after nearly every change."""
    sums = []
    for piece in pieces:
        flat = piece.tensor.detach().reshape(-1)
        sums.append(flat.view(_INTEGERS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64))
    if not sums:
        return ()
    return tuple(torch.stack([one.to(sums[0].device) for one in sums]).tolist())

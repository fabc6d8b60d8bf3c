"""Frozen weights: the first save writes them, later saves hard-link them as long as they do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, UnchangedFile
from ds_trainer.checkpoint.protocol.file_records import FileRecord, StoredFile
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.checkpoint.shards.shard_file import plan_shard_file
from ds_trainer.engine.state.flat_partitions import UnknownState
from ds_trainer.engine.state.state_shards import StateShard, frozen_names
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils import distributed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FrozenContent(ShardContent):
    """Shards of frozen weights. A copy of them is needed only until they are written, not for the next save."""


@dataclass(frozen=True)
class _UncopiedFrozen:
    """Frozen weights that are read from the engine while they are written, which happens only if a link fails.

    Writing raises RuntimeError if the weights no longer have the checksums ``sums``.
    """

    content: FrozenContent
    sums: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.content.name

    def write(self, stream: BinaryIO) -> None:
        self.content.write(stream)
        self._check()

    def write_shared(self, files: SharedFiles) -> None:
        self.content.write_shared(files)
        self._check()

    def _check(self) -> None:
        if integer_sums(self.content.shards) != self.sums:
            raise RuntimeError(f"{self.name}: frozen weights were changed while they were being written")


class FrozenFiles:
    """Tracks which weights are frozen, and which checkpoint on disk holds them. One per training.

    Args:
        names: the frozen parameters; the same on all ranks.
    """

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.names = names
        self._checkpoint: Path | None = None
        self._records: dict[str, FileRecord] = {}
        self._sums: tuple[int, ...] = ()  # of what is stored, or being written
        self._unchanged = False

    @classmethod
    def of(cls, engine: TrainingEngine) -> FrozenFiles:
        """For a new training. Has no names if only DeepSpeed knows the engine's state."""
        try:
            return cls(frozen_names(engine))
        except UnknownState:
            return cls()

    def file(self, content: FrozenContent) -> CheckpointFile:
        """Returns the file to write for this rank's part: a link if the weights are already stored. Collective.

        Takes one pass over the weights on their device, and one device sync.
        """
        sums = integer_sums(content.shards)
        changed = self._checkpoint is None or sums != self._sums
        self._unchanged = not distributed.agree(torch.tensor([int(changed)]))[0]
        self._sums = sums
        if not self._unchanged:
            self._checkpoint = None
            return content
        uncopied = _UncopiedFrozen(content, sums)
        in_model = plan_shard_file(content.shards, {}, content.locate).in_model
        return UnchangedFile(uncopied, None if in_model else self.stored(content.name))

    def stored(self, name: str, header: bytes = b"") -> StoredFile | None:
        """Returns the stored copy of a file of frozen weights; None if there is none or the weights have changed.

        Args:
            name: the file's name.
            header: the first bytes that the stored file must have.
        """
        if not self._unchanged or self._checkpoint is None or name not in self._records:
            return None
        return StoredFile(self._checkpoint / name, self._records[name], header)

    def record_save(self, checkpoint: Path, records: Iterable[FileRecord]) -> None:
        """Note that ``checkpoint`` holds the result of the last :meth:`file`, in the files of ``records``."""
        self._checkpoint, self._records = checkpoint, {record.name: record for record in records}

    def record_load(self, checkpoint: Path, records: Iterable[FileRecord], shards: Sequence[StateShard]) -> None:
        """Note that ``shards`` were read from ``checkpoint``, in any layout."""
        self.record_save(checkpoint, records)
        self._sums = integer_sums(shards)


def integer_sums(shards: Iterable[StateShard]) -> tuple[int, ...]:
    """Returns a checksum for each shard: the sum of its elements as integers of the same size, mod 2**64.

    Nearly every change of a tensor changes its sum.
    """
    sums = []
    for shard in shards:
        flat = shard.tensor.detach().reshape(-1)
        sums.append(flat.view(_INTEGERS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64))
    if not sums:
        return ()
    return tuple(torch.stack([one.to(sums[0].device) for one in sums]).tolist())

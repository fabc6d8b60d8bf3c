"""Which checkpoints stay when there are too many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory, Entry, check_sizes
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay. The newest and the best stay anyway.

    Attributes:
        keep: at most so many, not counting those of ``every``; None: any number.
        keep_bytes: at most so many bytes on the disk, not counting those of ``every``; a file that several checkpoints
            share (frozen weights) counts once. None: any number.
        every: those of steps that are a multiple of this stay for ever.
        best: the checkpoint of the best evaluation.
    """

    keep: int | None = None
    keep_bytes: int | None = None
    every: int | None = None
    best: Path | None = None

    def surplus(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of ``entries`` (oldest first) that are too many; damaged ones go first.

        None are, while the newest is not there in full: the last one that can be resumed from is never removed.
        """
        if not entries or not check_sizes(entries[-1]):
            return []
        counted = [entry for entry in entries if not self._stays_for_ever(entry)]
        best = None if self.best is None else self.best.resolve()
        free = [entry for entry in counted if entry is not entries[-1] and entry.path.resolve() != best]
        staying = len(counted) - len(free)
        too_many = 0 if self.keep is None else len(counted) - max(self.keep, staying)
        return free[: max(0, too_many, self._too_large(counted, free))]

    def _too_large(self, counted: Sequence[Entry], free: Sequence[Entry]) -> int:
        """How many of ``free``, oldest first, must go until all of ``counted`` fit."""
        if self.keep_bytes is None:
            return 0
        files = {entry.path: _files_on_disk(entry.path) for entry in counted}
        for count in range(len(free)):
            gone = {entry.path for entry in free[:count]}
            on_disk = {key: size for path, found in files.items() if path not in gone for key, size in found.items()}
            if sum(on_disk.values()) <= self.keep_bytes:
                return count
        return len(free)

    def apply(self, directory: CheckpointDirectory) -> None:
        """Remove what is too many; where that fails, it is a warning: nothing was lost.

        One process of those that share the directory calls it.
        """
        try:
            for entry in self.surplus(directory.entries()):
                limit = self.keep if self.keep_bytes is None else f"{self.keep_bytes / 1e9:g}GB"
                logger.info("Removing %s: save_total_limit=%s.", entry.path, limit)
                directory.remove(entry.path)
        except OSError as error:
            logger.warning("An old checkpoint in %s could not be removed: %s.", directory.path, error)

    def _stays_for_ever(self, entry: Entry) -> bool:
        return self.every is not None and entry.manifest is not None and entry.manifest.step % self.every == 0


def _files_on_disk(checkpoint: Path) -> dict[tuple[int, int], int]:
    """Bytes of each file of a checkpoint, by what it is on the disk, whatever its names."""
    found = [path.stat() for path in checkpoint.rglob("*") if path.is_file()]
    return {(file.st_dev, file.st_ino): file.st_size for file in found}


def bytes_on_disk(checkpoints: Iterable[Path]) -> int:
    """Bytes of these directories; a file that several share counts once."""
    return sum({key: size for path in checkpoints for key, size in _files_on_disk(path).items()}.values())

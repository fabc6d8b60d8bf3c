"""Which checkpoints are kept, and which are removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory, Entry, check_sizes
from ds_trainer.utils.logging import EVERY_RANK, get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Retention:
    """How many checkpoints to keep. The newest and the best are always kept.

    Attributes:
        keep: maximum number of checkpoints, not counting those of ``every``; None for no limit.
        keep_bytes: maximum number of bytes on disk, not counting those of ``every``; a file that several checkpoints
            share (frozen weights) counts once. None for no limit.
        every: checkpoints whose step is a multiple of this are kept permanently.
        best: the checkpoint of the best evaluation.
    """

    keep: int | None = None
    keep_bytes: int | None = None
    every: int | None = None
    best: Path | None = None

    def surplus(self, entries: Sequence[Entry]) -> list[Entry]:
        """Returns the ``entries`` (given oldest first) that exceed the limits, damaged ones first.

        Returns none while files of the newest one are missing or truncated: the last checkpoint that can be resumed
        from is never removed. Links, and directories without a manifest, are the user's: they neither count nor go.
        """
        if not entries or not check_sizes(entries[-1]):
            return []
        counted = [entry for entry in entries if entry.is_ours and not self._is_permanent(entry)]
        best = None if self.best is None else self.best.resolve()
        removable = [entry for entry in counted if entry is not entries[-1] and entry.path.resolve() != best]
        fixed = len(counted) - len(removable)
        over_limit = 0 if self.keep is None else len(counted) - max(self.keep, fixed)
        return removable[: max(0, over_limit, self._over_byte_limit(counted, removable))]

    def _over_byte_limit(self, counted: Sequence[Entry], removable: Sequence[Entry]) -> int:
        """How many of ``removable``, oldest first, must be removed until the rest of ``counted`` fits."""
        if self.keep_bytes is None:
            return 0
        files = {entry.path: _files_on_disk(entry.path) for entry in counted}
        for count in range(len(removable)):
            removed = {entry.path for entry in removable[:count]}
            on_disk = {key: size for path, sizes in files.items() if path not in removed for key, size in sizes.items()}
            if sum(on_disk.values()) <= self.keep_bytes:
                return count
        return len(removable)

    def apply(self, directory: CheckpointDirectory) -> None:
        """Remove the surplus checkpoints. A failure is only a warning, because nothing was lost.

        Called by one process of those that share the directory.
        """
        limit = self.keep if self.keep_bytes is None else f"{self.keep_bytes / 1e9:g}GB"
        text = "An old checkpoint in %s could not be removed: %s."
        try:
            for entry in self.surplus(directory.entries()):
                logger.info("Removing %s: save_total_limit=%s.", entry.path, limit)
                try:
                    directory.remove(entry.path)
                except OSError as error:  # the others can
                    logger.warning(text, directory.path, error, extra=EVERY_RANK)
        except OSError as error:
            logger.warning(text, directory.path, error, extra=EVERY_RANK)

    def _is_permanent(self, entry: Entry) -> bool:
        return self.every is not None and entry.manifest is not None and entry.manifest.step % self.every == 0


def _files_on_disk(checkpoint: Path) -> dict[tuple[int, int], int]:
    """Bytes of each file of a checkpoint, by device and inode, so that hard links count once."""
    stats = [path.stat() for path in checkpoint.rglob("*") if path.is_file()]
    return {(file.st_dev, file.st_ino): file.st_size for file in stats}


def bytes_on_disk(checkpoints: Iterable[Path]) -> int:
    """Returns the bytes of these directories on disk; a file that several share counts once."""
    return sum({key: size for path in checkpoints for key, size in _files_on_disk(path).items()}.values())

"""Which checkpoints stay when there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory, Entry, check_sizes
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay.

    Attributes:
        keep: at most so many, not counting those of ``every``; None keeps all. The newest and the best stay anyway.
        every: those of steps that are a multiple of this stay for ever.
        best: the checkpoint of the best evaluation.
    """

    keep: int | None = None
    every: int | None = None
    best: Path | None = None

    def surplus(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of ``entries`` (oldest first) that are too many; damaged ones go first.

        None are, while the newest is not there in full: the last one that can be resumed from is never removed.
        """
        if self.keep is None or not entries or not check_sizes(entries[-1]):
            return []
        counted = [entry for entry in entries if not self._stays_for_ever(entry)]
        best = None if self.best is None else self.best.resolve()
        free = [entry for entry in counted if entry is not entries[-1] and entry.path.resolve() != best]
        staying = len(counted) - len(free)
        too_many = len(counted) - max(self.keep, staying)
        return free[: max(0, too_many)]

    def apply(self, directory: CheckpointDirectory) -> None:
        """Remove what is too many; where that fails, it is a warning: nothing was lost.

        One process of those that share the directory calls it.
        """
        try:
            for entry in self.surplus(directory.entries()):
                logger.info("Removing %s: save_total_limit=%s.", entry.path, self.keep)
                directory.remove(entry.path)
        except OSError as error:
            logger.warning("An old checkpoint in %s could not be removed: %s.", directory.path, error)

    def _stays_for_ever(self, entry: Entry) -> bool:
        return self.every is not None and entry.manifest is not None and entry.manifest.step % self.every == 0

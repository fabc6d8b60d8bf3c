"""The directory in which a run's checkpoints live: their names, how they appear, are replaced, found and removed.

``checkpoint-N``: the state after step N; whole, since it gets this name by a rename when everything is on the disk.
``.checkpoint-N.<hex>.partial``: being written. ``....old``: the one before of the same name, while it is replaced.
``....removed``: on its way out. ``latest``: the name of the newest one, for people and scripts; written last.

What a process that was killed leaves behind is one of these three hidden names, and :meth:`CheckpointDirectory.tidy`
settles it.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import NamedTuple

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.files import CheckpointFiles, damage
from ds_trainer.checkpoint.protocol.foreign_formats import recognise
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint, Manifest
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

POINTER = "latest"
_NAME = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.(checkpoint-\d+|latest)\.[0-9a-f]{8}\.(partial|old|removed)")


class Entry(NamedTuple):
    """A directory called ``checkpoint-N`` that has a manifest.

    Attributes:
        path: of the directory.
        manifest: None where it is damaged.
        problem: what is wrong with it then.
    """

    path: Path
    manifest: Manifest | None
    problem: str = ""


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoints in ``output_dir`` with an intact manifest, in the order in which they were written."""
    return [entry.path for entry in CheckpointDirectory(output_dir).entries() if entry.manifest is not None]


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint with an intact manifest; its files are not read."""
    try:
        Manifest.read(path)
    except BrokenCheckpoint:
        return False
    return True


class CheckpointDirectory:
    """The checkpoints below ``path``. One process at a time may call what changes them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """All checkpoints, damaged ones first, then in the order in which they were written."""
        if not self.path.is_dir():
            return []
        found = []
        for path in self.path.iterdir():
            if _NAME.fullmatch(path.name) and (path / MANIFEST_FILE).is_file():
                try:
                    found.append(Entry(path, Manifest.read(path)))
                except BrokenCheckpoint as error:
                    found.append(Entry(path, None, str(error)))
        return sorted(found, key=lambda entry: (_generation(entry), entry.path.name))

    def has_checkpoints(self) -> bool:
        """Whether there are any, damaged or not; nothing is read."""
        if not self.path.is_dir():
            return False
        return any(_NAME.fullmatch(path.name) and (path / MANIFEST_FILE).is_file() for path in self.path.iterdir())

    def next_generation(self) -> int:
        """What the next checkpoint's ``generation`` is."""
        return 1 + max((_generation(entry) for entry in self.entries()), default=0)

    # -- a new one --------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """A new hidden directory to write the checkpoint of ``step`` into.

        Raises:
            OSError: it cannot be made.
        """
        partial = self._hidden(checkpoint_name(step), "partial")
        disk.make_directory(partial)
        return partial

    def publish(self, partial: Path, step: int) -> Path | None:
        """Give the complete directory ``partial`` its name, and tell that it is the latest.

        Returns:
            What had this name before, to be removed when the new one is safe everywhere.

        Raises:
            OSError: it failed; :meth:`tidy` settles what is left.
        """
        final = self.path / checkpoint_name(step)
        pointer = self._write_pointer(final)  # all that needs space comes first
        before = None
        if final.exists():
            before = self._hidden(final.name, "old")
            disk.rename(final, before)
        disk.rename(partial, final)
        disk.flush_file(self.path)
        self._set_pointer(pointer)
        return before

    def point_at(self, checkpoint: Path) -> None:
        """Tell that ``checkpoint`` is the latest."""
        self._set_pointer(self._write_pointer(checkpoint))

    def _write_pointer(self, checkpoint: Path) -> Path:
        partial = self._hidden(POINTER, "partial")
        with CheckpointFiles(self.path).create(partial.name) as stream:
            stream.write(f"{checkpoint.name}\n".encode())
        return partial

    def _set_pointer(self, partial: Path) -> None:
        disk.rename(partial, self.path / POINTER)
        disk.flush_file(self.path)

    # -- out with the old ---------------------------------------------------------------------------------------------

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint: it is gone at once, whenever the process ends."""
        removed = self._hidden(checkpoint.name, "removed")
        disk.rename(checkpoint, removed)
        disk.flush_file(self.path)
        disk.remove_tree(removed)

    def tidy(self) -> list[str]:
        """Settle what a process left behind that was killed; what was done, for a log.

        A checkpoint that was being replaced gets its name back, unless the new one has it already.
        """
        done = []
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            match = _HIDDEN.fullmatch(path.name)
            if match is None:
                continue
            final = self.path / match[1]
            if match[2] == "old" and not final.exists():
                disk.rename(path, final)
                disk.flush_file(self.path)
                done.append(f"{final.name} has its name back: a process was killed while it wrote another one")
            elif path.is_dir():
                disk.remove_tree(path)
                done.append(f"{path.name} is removed: a process was killed while it wrote or removed it")
            else:
                disk.remove_file(path)
        return done

    def _hidden(self, name: str, kind: str) -> Path:
        return self.path / f".{name}.{uuid.uuid4().hex[:8]}.{kind}"


def check_sizes(entry: Entry) -> bool:
    """Whether a checkpoint's files are there in full length: a look that costs no reading."""
    if entry.manifest is None:
        return False
    return not any(damage(entry.path, record, sum_up=False) for record in entry.manifest.files.values())


def find_checkpoint(asked: str | bool, output_dir: Path) -> Path | None:
    """A first look at what ``train(resume_from_checkpoint=...)`` asks for, before there is a process group.

    Returns:
        The path of the checkpoint; None for the newest in ``output_dir``, which ranks find together.

    Raises:
        ConfigError: there is none.
    """
    if str(asked).lower() == "true":  # a recipe and a command line have words only
        directory = CheckpointDirectory(output_dir)
        kept = output_dir.glob(".checkpoint-*.old") if output_dir.is_dir() else ()  # tidy() may bring it back
        if not directory.has_checkpoints() and not any(kept):
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir} holds no complete checkpoint-N directory. Start "
                "without it, or give the path of a checkpoint."
            )
        return None
    path = Path(str(asked)).expanduser()
    if not (path / MANIFEST_FILE).is_file() and recognise(path) is None:
        raise ConfigError(
            f"resume_from_checkpoint={str(path)!r} is no complete checkpoint ({MANIFEST_FILE} is missing in it). "
            f"Complete ones in {output_dir}: {', '.join(p.name for p in list_checkpoints(output_dir)) or 'none'}."
        )
    return path


def _generation(entry: Entry) -> int:
    return 0 if entry.manifest is None else entry.manifest.generation

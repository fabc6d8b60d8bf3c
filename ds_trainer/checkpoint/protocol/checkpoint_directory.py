"""The directory of a run's checkpoints: their names, and how they are published, replaced, found and removed.

``checkpoint-N``                 the state after step N; complete, because it gets this name by a rename once
                                 everything is on disk
``.checkpoint-N.<hex>.partial``  being written
``.checkpoint-N.<hex>.old``      the previous checkpoint of this name, while it is being replaced
``.checkpoint-N.<hex>.removed``  being deleted
``checkpoint-N.previous-<hex>``  what another program had put at ``checkpoint-N`` before step N was saved; never removed
``latest``                       a file with the name of the newest checkpoint, for people and scripts; written last

A killed process leaves one of the three hidden names behind; :meth:`CheckpointDirectory.tidy` cleans them up.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.file_records import find_damage
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.protocol.other_formats import detect_format
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import directory_problem, user_path
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.output_files import set_aside

logger = get_logger(__name__)

HOW_TO_RESUME = (
    "call train(resume_from_checkpoint=True), or add --auto_resume True (of a recipe: --arguments.auto_resume True) to "
    "the command"
)
"""For messages. The Trainer reads ``auto_resume``; what ``--resume_from_checkpoint`` does is up to the script."""

POINTER = "latest"
_NAME = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.(checkpoint-\d+|latest)\.[0-9a-f]{8}\.(partial|old|removed)")


class Entry(NamedTuple):
    """A directory named ``checkpoint-N``.

    Attributes:
        path: the directory.
        manifest: None if it is damaged or missing.
        problem: what is wrong with the manifest, if anything.
        is_ours: it has a manifest and is no link, so this package may remove it; anything else belongs to the user.
    """

    path: Path
    manifest: Manifest | None
    problem: str = ""
    is_ours: bool = True


def checkpoint_name(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Returns the checkpoints in ``output_dir`` with an intact manifest, in the order in which they were written."""
    return [entry.path for entry in CheckpointDirectory(output_dir).entries() if entry.manifest is not None]


def is_checkpoint(path: Path) -> bool:
    """Returns whether ``path`` is a checkpoint with an intact manifest. Does not read its files."""
    try:
        Manifest.read(path)
    except BrokenCheckpoint:
        return False
    return True


class CheckpointDirectory:
    """The checkpoints in ``path``. Only one process at a time may call the methods that change them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pinned: int | None = None

    def pin(self) -> None:
        """Remember the directory itself: once another one has its name, :meth:`begin` fails, and nothing is removed."""
        self._pinned = os.open(self.path, os.O_RDONLY)
        self._unpin = weakref.finalize(self, os.close, self._pinned)

    def unpin(self) -> None:
        """Forget it."""
        if self._pinned is not None:
            self._pinned = None
            self._unpin()

    def entries(self) -> list[Entry]:
        """Returns all checkpoints: damaged ones first, then the others in the order in which they were written."""
        entries = []
        for path in self._named():
            is_ours = _has_manifest(path) and not path.is_symlink()
            try:
                entries.append(Entry(path, Manifest.read(path), is_ours=is_ours))
            except BrokenCheckpoint as error:
                entries.append(Entry(path, None, f"{error}{_how_to_use(path)}", is_ours))
        return sorted(entries, key=lambda entry: (_generation(entry), entry.path.name))

    def has_checkpoints(self) -> bool:
        """Returns whether there is any checkpoint, damaged or not, whoever wrote it. Reads no files."""
        return any(True for _ in self._named())

    def _named(self) -> Iterator[Path]:
        """Directories ``checkpoint-N``; empty ones hold nothing that could be lost, or resumed from."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _NAME.fullmatch(path.name) and path.is_dir() and any(path.iterdir()):
                yield path

    def next_generation(self) -> int:
        """Returns the ``generation`` of the next checkpoint."""
        return 1 + max((_generation(entry) for entry in self.entries()), default=0)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Creates and returns a hidden directory to write the checkpoint of ``step`` into.

        Raises:
            OSError: it cannot be created, or the directory is not the one that :meth:`pin` has seen.
        """
        if self._pinned is not None and not os.path.samestat(os.fstat(self._pinned), self.path.stat()):
            text = "another directory has this name since the training began; move it away, or stop and resume"
            raise OSError(errno.ESTALE, text, str(self.path))
        partial = self._hidden(checkpoint_name(step), "partial")
        disk.make_directory(partial)
        return partial

    def publish(self, partial: Path, step: int) -> Path | None:
        """Rename the complete directory ``partial`` to its final name, and point ``latest`` at it.

        Returns:
            The checkpoint that had this name before, if any; remove it once the new one is safe on all nodes.

        Raises:
            OSError: a file operation failed, and the checkpoint has not its name; call :meth:`tidy` to clean up.
        """
        final = self.path / checkpoint_name(step)
        pointer = self._write_pointer(final)  # first, because it needs disk space
        replaced = kept = None
        if os.path.lexists(final):
            if _has_manifest(final) or final.is_symlink():
                aside = replaced = self._hidden(final.name, "old")
            else:
                aside = kept = self.path / f"{final.name}.previous-{uuid.uuid4().hex[:8]}"
            disk.rename(final, aside)
        disk.rename(partial, final)
        try:
            disk.flush_file(self.path)
            if kept is not None:
                _return_files(kept, final)
            self._set_pointer(pointer)
        except OSError as error:  # the checkpoint is there, so the save has not failed
            text = "%s is complete, but its directory or %s could not be updated: %s."
            logger.warning(text, final, POINTER, error, extra=EVERY_RANK)
            return None  # the next training removes the replaced one
        return replaced

    def point_at(self, checkpoint: Path) -> None:
        """Point ``latest`` at ``checkpoint``."""
        self._set_pointer(self._write_pointer(checkpoint))

    def _write_pointer(self, checkpoint: Path) -> Path:
        partial = self._hidden(POINTER, "partial")
        with CheckpointFileWriter(self.path).create(partial.name) as stream:
            stream.write(f"{checkpoint.name}\n".encode())
        return partial

    def _set_pointer(self, partial: Path) -> None:
        pointer = self.path / POINTER
        if os.path.lexists(pointer) and not _is_pointer(pointer):  # DeepSpeed's own, for one
            set_aside(pointer, disk.rename)
        disk.rename(partial, pointer)
        disk.flush_file(self.path)

    # -- removing -----------------------------------------------------------------------------------------------------

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint. It loses its name first, so no partial checkpoint is left if the process is killed."""
        disk.check_mounts(checkpoint)
        removed = self._hidden(checkpoint.name, "removed")
        disk.rename(checkpoint, removed)
        disk.flush_file(self.path)
        disk.remove_tree(removed)

    def tidy(self) -> list[str]:
        """Clean up what a killed process left behind. Returns what was done, for a log.

        A checkpoint that was being replaced gets its name back, unless the new one already has it.
        """
        actions = []
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            match = _HIDDEN.fullmatch(path.name)
            if match is None:
                continue
            final = self.path / match[1]
            if match[2] == "old" and not final.exists():
                disk.rename(path, final)
                disk.flush_file(self.path)
                actions.append(f"restored {final.name}: a process was killed while replacing it")
            elif path.is_dir() and not path.is_symlink():
                disk.remove_tree(path)
                actions.append(f"removed {path.name}: a process was killed while writing or removing it")
            else:
                disk.remove_file(path)
        return actions

    def _hidden(self, name: str, kind: str) -> Path:
        return self.path / f".{name}.{uuid.uuid4().hex[:8]}.{kind}"


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file()


def _how_to_use(path: Path) -> str:
    """For a message about a directory without an intact manifest."""
    foreign = None if _has_manifest(path) else detect_format(path)
    return (
        "" if foreign is None else f" {foreign.format.value} wrote it: resume_from_checkpoint={str(path)!r} reads it."
    )


def _is_pointer(path: Path) -> bool:
    """Whether this package wrote what is at ``path``, or nothing can replace it: a directory."""
    if path.is_symlink() or not path.is_file():
        return path.is_dir() and not path.is_symlink()
    with path.open("rb") as stream:
        return _NAME.fullmatch(stream.read(100).decode(errors="replace").strip()) is not None


def _return_files(kept: Path, final: Path) -> None:
    """Give files that a script had put at the name of a checkpoint their place back, beside the checkpoint's own.

    If both have a name in common, or ``kept`` is no directory, it stays as it is.
    """
    names = {entry.name for entry in kept.iterdir()} if kept.is_dir() else {""}
    if any(name == "" or os.path.lexists(final / name) for name in names):
        logger.warning("%s was there before this checkpoint was written; it is kept as %s.", final, kept.name)
        return
    for name in names:
        disk.rename(kept / name, final / name)
    disk.remove_directory(kept)


def check_sizes(entry: Entry) -> bool:
    """Returns whether all files of a checkpoint exist and have the recorded sizes. Does not read them."""
    if entry.manifest is None:
        return False
    return not any(find_damage(entry.path, record, compare_checksum=False) for record in entry.manifest.files.values())


def find_checkpoint(requested: str | bool, output_dir: Path) -> Path | None:
    """Checks the argument of ``train(resume_from_checkpoint=...)`` before the process group exists.

    Returns:
        The path of the checkpoint; None for the newest one in ``output_dir``, which the ranks select together.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    if str(requested).lower() == "true":  # recipes and command lines pass strings
        directory = CheckpointDirectory(output_dir)
        replaced = output_dir.glob(".checkpoint-*.old") if output_dir.is_dir() else ()  # tidy() may restore one
        if not directory.has_checkpoints() and not any(replaced):
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir} holds no complete checkpoint-N directory. Start "
                "without resume_from_checkpoint, or give the path of a checkpoint."
            )
        return None
    path = user_path(str(requested), f"The checkpoint {requested!s}")
    if (problem := directory_problem(path)) is not None:
        raise ConfigError(f"resume_from_checkpoint={str(path)!r} {problem}. Name the directory of a checkpoint.")
    if not (path / MANIFEST_FILE).is_file() and detect_format(path) is None:
        raise ConfigError(
            f"resume_from_checkpoint={str(path)!r} is not a complete checkpoint: it has no {MANIFEST_FILE}. "
            f"{output_dir} has these: {listed(p.name for p in list_checkpoints(output_dir)) or 'none'}."
        )
    return path


def _generation(entry: Entry) -> int:
    return 0 if entry.manifest is None else entry.manifest.generation

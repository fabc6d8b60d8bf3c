"""One checkpoint from the first byte to its name. All ranks that write it run this together.

    begin     the first rank of a directory makes a hidden one beside the final name, and in it the shared files
    write     every rank writes its files, and its bytes of shared ones; each is on the disk when it is closed
    manifest  the first rank lists all of them, with sizes and checksums
    publish   it renames the directory; then the pointer to the latest
    forget    what had the name before is removed

After each of these rank 0 hears from all ranks and tells them, so that a failure of one is a failure of all: what was
begun is removed, and the checkpoints that were there stay. A process that is killed leaves what ``tidy`` settles.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.contents import Content, Unchanged, WritesShared
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory, checkpoint_name
from ds_trainer.checkpoint.protocol.files import CheckpointFiles, FileRecord
from ds_trainer.checkpoint.protocol.manifest import Manifest, records_by_name, versions
from ds_trainer.checkpoint.protocol.shared_files import SharedFile, SharedFiles, put_together
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; raised on all ranks, and nothing of it is left.

    Attributes:
        by_disk: an operation on files failed (no space, no permission, no such directory), and nothing else.
    """

    def __init__(self, message: str, by_disk: bool) -> None:
        super().__init__(message)
        self.by_disk = by_disk


class _Begun(NamedTuple):
    """What the first rank of a directory says when it has begun: name of the hidden directory, what to call it, and
    which shared files it has linked to."""

    name: str
    generation: int
    save_id: str
    linked: list[str]


def _known(begun: list[Any]) -> tuple[list[tuple[int, str]], list[str], dict[str, Any]]:
    """What all ranks are told: the hidden directories, by the rank that made each; the shared files in them that were
    linked to; what all manifests say."""
    made = [(rank, _Begun(*one)) for rank, one in enumerate(begun) if one is not None]
    generation = max(one.generation for _, one in made)
    names, linked = [(rank, one.name) for rank, one in made], made[0][1].linked
    return names, linked, {"generation": generation, "save_id": made[0][1].save_id}


class CheckpointSave:
    """Writes one checkpoint.

    Args:
        directory: where it will appear.
        sharing: who writes there.
        step: optimizer steps done.
        facts: what the manifest says besides (:class:`~ds_trainer.checkpoint.protocol.manifest.Manifest`):
            layout, zero_stage, precision, arguments, only_model, engine.
        messages: how ranks hear from each other; from another thread than the training's it must not be collectives of
            the same process group.
        shared: files that all ranks write together, alike on all of them; only where all share one directory.

    Attributes:
        written: records of this rank's files; on the rank that lists them, of all.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        sharing: Sharing,
        step: int,
        facts: Mapping[str, Any],
        messages: Messages,
        shared: Sequence[SharedFile] = (),
    ) -> None:
        self._directory = directory
        self._sharing = sharing
        self._step = step
        self._facts = facts
        self._messages = messages
        if shared and sharing.nodes > 1:
            raise ValueError("files are shared by ranks that do not share a directory")
        self._shared = shared
        self._made: SharedFiles | None = None  # on the rank that made the directory
        self._parts: list[Any] = []  # of shared files, of all ranks, on rank 0
        self._partial: Path | None = None
        self._replaced: Path | None = None
        self._linked: list[str] = []  # shared files that lie in an earlier checkpoint
        self.written: list[FileRecord] = []
        self._records: list[FileRecord] = []  # of all files in the directory, on the rank that lists them

    def run(self, contents: Iterable[Content], by_others: Callable[[Path], None] | None = None) -> Path:
        """Write and publish. Collective.

        Args:
            contents: this rank's files; each is written before the next is asked for.
            by_others: writes further files into a directory, collectively; they are taken into the manifest.

        Returns:
            The checkpoint's path.

        Raises:
            SaveFailed: something failed on some rank.
        """
        try:
            names, self._linked, known = self._together("make a directory for it", self._begin, _known)
            partial = self._directory.path / dict(names)[self._sharing.first]
            if by_others is not None:
                by_others(partial)
            of_nodes = self._together("write its files", lambda: self._write(partial, contents), self._collect)
            if of_nodes is not None and self._sharing.commits:
                self._records = [FileRecord(*record) for record in dict(of_nodes)[self._sharing.rank]]
            self._together("list its files", lambda: self._list(partial, known, by_others is not None))
            self._together("publish it", lambda: self._publish(partial))
            self._partial = None
            if self._replaced is not None:
                _remove(self._replaced)
        except BaseException:
            self._discard()
            raise
        return self._directory.path / checkpoint_name(self._step)

    # -- the stages ---------------------------------------------------------------------------------------------------

    def _begin(self) -> _Begun | None:
        if not self._sharing.commits:
            return None
        generation = self._directory.next_generation()
        self._partial = self._directory.begin(self._step)
        self._made = SharedFiles(self._partial, self._shared)
        linked = self._made.make()
        return _Begun(self._partial.name, generation, uuid.uuid4().hex, linked)

    def _write(self, partial: Path, contents: Iterable[Content]) -> tuple[list[FileRecord], list[Any]]:
        files, shared = CheckpointFiles(partial), self._made or SharedFiles(partial, self._shared)
        for content in contents:
            unchanged = content if isinstance(content, Unchanged) else None
            if unchanged is None or unchanged.stored is None or not files.link(content.name, unchanged.stored):
                with files.create(content.name) as stream:
                    content.write(stream)
            if self._shared and isinstance(content, WritesShared) and not (unchanged and self._linked):
                content.write_shared(shared)
        self.written = files.records
        return files.records, list(shared.parts.values())

    def _collect(self, written: Sequence[Sequence[Any]]) -> list[Any] | None:
        """On rank 0: the records of each directory, by the rank that lists them. Those of the only one stay here."""
        if self._sharing.nodes == 1:
            self._records = [FileRecord(*record) for records, _ in written for record in records]
            self._parts = [part for _, parts in written for part in parts]
            return None
        found: dict[int, list[Any]] = {}
        for first, (records, _) in zip(self._sharing.firsts, written, strict=True):
            found.setdefault(first, []).extend(records)
        return list(found.items())

    def _list(self, partial: Path, known: Mapping[str, Any], search: bool) -> None:
        if not self._sharing.commits:
            return
        files = CheckpointFiles(partial)
        self._records += put_together(self._shared, self._parts, self._linked)
        self.written = self._records
        listed = {record.name for record in self._records}
        found = [path for path in sorted(partial.rglob("*")) if search and path.is_file()]
        for name in (path.relative_to(partial).as_posix() for path in found):
            if name not in listed:
                files.adopt(name)
        folders = {path.parent for path in (*found, *(partial / name for name in listed))} - {partial}
        for folder in sorted(folders, reverse=True):
            disk.flush_file(folder)
        manifest = Manifest(
            step=self._step,
            node=self._sharing.node,
            nodes=self._sharing.nodes,
            written=time.time(),
            versions=versions(),
            files=records_by_name([*self._records, *files.records]),
            **known,
            **self._facts,
        )
        manifest.write(files)
        disk.flush_file(partial)

    def _publish(self, partial: Path) -> None:
        if self._sharing.commits:
            self._replaced = self._directory.publish(partial, self._step)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _together(self, stage: str, act: Callable[[], T], told: Callable[[list[T]], Any] = lambda results: None) -> Any:
        """``act()`` on every rank; raises on all where it failed on one.

        Args:
            stage: what it does, for the error.
            act: returns plain data.
            told: of the results of all ranks, on rank 0: what all ranks are told.
        """
        result, failure = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        said = None if failure is None else (f"{type(failure).__name__}: {failure}", isinstance(failure, OSError))
        heard = self._messages.gather_to_main((result, said))
        verdict: Any = None
        if heard is not None:
            failed = [(rank, *said) for rank, (_, said) in enumerate(heard) if said is not None]
            by_disk = all(by_disk for *_, by_disk in failed)
            verdict = (*failed[0][:2], len(failed), by_disk) if failed else told([one for one, _ in heard])
            verdict = bool(failed), verdict
        has_failed, verdict = self._messages.broadcast_object(verdict)
        if has_failed:
            rank, text, count, by_disk = verdict
            others = f" (and {count - 1} more)" if count > 1 else ""
            raise SaveFailed(
                f"{checkpoint_name(self._step)} could not be written to {self._directory.path}: rank {rank}{others} "
                f"failed to {stage}: {text}. The checkpoints that were there are as they were.",
                by_disk=by_disk,
            ) from failure
        return verdict

    def _discard(self) -> None:
        """Remove what was begun, and give back its name to what was to be replaced."""
        if self._partial is None:
            return
        self._partial = None
        try:
            self._directory.tidy()
        except OSError as error:
            logger.warning("%s could not be tidied (%s); the next training there will.", self._directory.path, error)


def _remove(path: Path) -> None:
    try:
        disk.remove_tree(path)
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next training in its directory will.", path, error)

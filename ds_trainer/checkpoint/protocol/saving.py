"""One checkpoint from the first byte to its name. All ranks that write it run this together.

    begin     the first rank of a directory makes a hidden one beside the final name
    write     every rank writes its files; each is on the disk when it is closed
    manifest  the first rank lists all of them, with sizes and checksums
    publish   it renames the directory; then the pointer to the latest
    forget    what had the name before is removed

After each of these all ranks hear from all others, so that a failure of one is a failure of all: what was begun is
removed, and the checkpoints that were there stay. A process that is killed leaves what ``tidy`` settles.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.contents import Content
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory, checkpoint_name
from ds_trainer.checkpoint.protocol.files import CheckpointFiles, FileRecord
from ds_trainer.checkpoint.protocol.manifest import Manifest, records_by_name, versions
from ds_trainer.checkpoint.protocol.sharing import Gather, Sharing
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
    """What the first rank of a directory says when it has begun: name of the hidden directory, and what to call it."""

    name: str
    generation: int
    save_id: str


class CheckpointSave:
    """Writes one checkpoint.

    Args:
        directory: where it will appear.
        sharing: who writes there.
        step: optimizer steps done.
        facts: what the manifest says besides (:class:`~ds_trainer.checkpoint.protocol.manifest.Manifest`):
            layout, zero_stage, precision, arguments, only_model, engine.
        gather: how ranks hear from each other; from another thread than the training's it needs a process group of its
            own.
    """

    def __init__(
        self, directory: CheckpointDirectory, sharing: Sharing, step: int, facts: Mapping[str, Any], gather: Gather
    ) -> None:
        self._directory = directory
        self._sharing = sharing
        self._step = step
        self._facts = facts
        self._gather = gather
        self._partial: Path | None = None

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
            begun = [_Begun(*one) for one in self._together("make a directory for it", self._begin)]
            partial = self._directory.path / begun[self._sharing.first].name
            if by_others is not None:
                by_others(partial)
            records = self._together("write its files", lambda: self._write(partial, contents))
            mine = [FileRecord(*record) for rank in self._sharing.ranks for record in records[rank]]
            known = {"generation": max(one.generation for one in begun), "save_id": begun[0].save_id}
            self._together("list its files", lambda: self._list(partial, mine, known, by_others is not None))
            replaced = self._together("publish it", lambda: self._publish(partial))[self._sharing.rank]
            self._partial = None
            if replaced is not None:
                _remove(Path(replaced))
        except BaseException:
            self._discard()
            raise
        return self._directory.path / checkpoint_name(self._step)

    # -- the stages ---------------------------------------------------------------------------------------------------

    def _begin(self) -> _Begun:
        if not self._sharing.commits:
            return _Begun("", 0, "")
        generation = self._directory.next_generation()
        self._partial = self._directory.begin(self._step)
        return _Begun(self._partial.name, generation, uuid.uuid4().hex)

    def _write(self, partial: Path, contents: Iterable[Content]) -> list[FileRecord]:
        files = CheckpointFiles(partial)
        for content in contents:
            with files.create(content.name) as stream:
                content.write(stream)
        return files.records

    def _list(self, partial: Path, records: list[FileRecord], known: Mapping[str, Any], search: bool) -> None:
        if not self._sharing.commits:
            return
        files = CheckpointFiles(partial)
        listed = {record.name for record in records}
        found = [path for path in sorted(partial.rglob("*")) if search and path.is_file()]
        for name in (path.relative_to(partial).as_posix() for path in found):
            if name not in listed:
                files.adopt(name)
        for folder in {path.parent for path in found} - {partial}:
            disk.flush_file(folder)
        manifest = Manifest(
            step=self._step,
            node=self._sharing.node,
            nodes=self._sharing.nodes,
            written=time.time(),
            versions=versions(),
            files=records_by_name([*records, *files.records]),
            **known,
            **self._facts,
        )
        manifest.write(files)
        disk.flush_file(partial)

    def _publish(self, partial: Path) -> str | None:
        replaced = self._directory.publish(partial, self._step) if self._sharing.commits else None
        return None if replaced is None else str(replaced)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _together(self, stage: str, act: Callable[[], T]) -> list[T]:
        """``act()`` of every rank, plain data; raises on all where it failed on one."""
        result, failure = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        said = None if failure is None else (f"{type(failure).__name__}: {failure}", isinstance(failure, OSError))
        told = self._gather((result, said))
        failed = {rank: said for rank, (_, said) in enumerate(told) if said is not None}
        if failed:
            rank, (text, _) = next(iter(failed.items()))
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise SaveFailed(
                f"{checkpoint_name(self._step)} could not be written to {self._directory.path}: rank {rank}{others} "
                f"failed to {stage}: {text}. The checkpoints that were there are as they were.",
                by_disk=all(by_disk for _, by_disk in failed.values()),
            ) from failure
        return [result for result, _ in told]

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

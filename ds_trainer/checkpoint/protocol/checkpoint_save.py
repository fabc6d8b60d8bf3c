"""Writes one checkpoint, from the first byte to its final name. All ranks that write it run this together.

    begin     the leader of a directory creates a hidden directory next to the final name, and in it the shared files
    write     every rank writes its files and its bytes of the shared files; each file is on disk when it is closed
    manifest  the leader lists all files, with sizes and checksums
    publish   the leader renames the directory, then updates the pointer to the latest checkpoint
    clean up  the leader removes the checkpoint that had the name before

After each stage, rank 0 gathers the results of all ranks and broadcasts the outcome, so a failure on one rank is a
failure on all: the unfinished directory is removed and earlier checkpoints stay. What a killed process leaves behind,
``CheckpointDirectory.tidy`` cleans up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory, checkpoint_name
from ds_trainer.checkpoint.protocol.checkpoint_file import (
    CheckpointFile,
    FallbackFile,
    UnchangedFile,
    WritesSharedFiles,
)
from ds_trainer.checkpoint.protocol.file_records import FileRecord
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.checkpoint.protocol.manifest import Manifest, records_by_name, versions
from ds_trainer.checkpoint.protocol.shared_files import SharedFile, SharedFiles, combine_records
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.outcomes import record_checkpoint

logger = get_logger(__name__)

T = TypeVar("T")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Raised on all ranks; nothing of the checkpoint is left.

    Attributes:
        by_disk: only file operations failed (no space, no permission, no such directory).
        failed_rank: the first rank that failed. A launcher is told its error alone.
    """

    def __init__(self, message: str, by_disk: bool, failed_rank: int) -> None:
        super().__init__(message)
        self.by_disk, self.failed_rank = by_disk, failed_rank


class _Begun(NamedTuple):
    """The leader's result of the first stage: name of the hidden directory, what the manifest needs, linked files."""

    name: str
    generation: int
    save_id: str
    linked: list[str]


def _summarize_begun(results: list[Any]) -> tuple[list[tuple[int, str]], list[str], dict[str, Any]]:
    """What all ranks need to know after the first stage.

    Returns:
        The hidden directories with the rank that created each; the shared files that were linked; and the manifest
        fields that are the same in all directories.
    """
    begun = [(rank, _Begun(*result)) for rank, result in enumerate(results) if result is not None]
    generation = max(one.generation for _, one in begun)
    names, linked = [(rank, one.name) for rank, one in begun], begun[0][1].linked
    return names, linked, {"generation": generation, "save_id": begun[0][1].save_id}


class CheckpointSave:
    """Writes one checkpoint.

    Args:
        directory: where the checkpoint will appear.
        writer_group: the ranks that write there.
        step: optimizer steps done.
        metadata: further fields of the manifest (:class:`~ds_trainer.checkpoint.protocol.manifest.Manifest`):
            layout, zero_stage, precision, arguments, only_model, engine.
        communicator: exchanges results between ranks. Outside the training thread, it must not use collectives of the
            training's process group.
        shared: files that all ranks write together, the same on all ranks; requires a single shared directory.

    Attributes:
        written: records of this rank's files; on the rank that writes the manifest, of all files.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        writer_group: WriterGroup,
        step: int,
        metadata: Mapping[str, Any],
        communicator: Communicator,
        shared: Sequence[SharedFile] = (),
    ) -> None:
        self._directory = directory
        self._writer_group = writer_group
        self._step = step
        self._metadata = metadata
        self._communicator = communicator
        if shared and writer_group.nodes > 1:
            raise ValueError("shared files need one directory for all ranks")
        self._shared = shared
        self._created: SharedFiles | None = None  # on the rank that created the directory
        self._parts: list[Any] = []  # of shared files, from all ranks; on rank 0
        self._partial: Path | None = None
        self._replaced: Path | None = None
        self._linked: list[str] = []  # shared files that are links to an earlier checkpoint
        self.written: list[FileRecord] = []
        self._records: list[FileRecord] = []  # of all files in the directory; on the rank that writes the manifest

    def run(self, files: Iterable[CheckpointFile], write_external: Callable[[Path], None] | None = None) -> Path:
        """Write and publish the checkpoint. Collective.

        Args:
            files: this rank's files; each is written before the next one is requested.
            write_external: writes further files into a directory, collectively; they are added to the manifest.

        Returns:
            The checkpoint's path.

        Raises:
            SaveFailed: a stage failed on some rank.
        """
        try:
            names, self._linked, common = self._run_stage("create a directory for it", self._begin, _summarize_begun)
            partial = self._directory.path / dict(names)[self._writer_group.leader]
            if write_external is not None:
                write_external(partial)
            by_leader = self._run_stage("write its files", lambda: self._write(partial, files), self._collect)
            if by_leader is not None and self._writer_group.is_leader:
                self._records = [FileRecord(*record) for record in dict(by_leader)[self._writer_group.rank]]
            self._run_stage(
                "write its manifest", lambda: self._write_manifest(partial, common, write_external is not None)
            )
            self._run_stage("publish it", lambda: self._publish(partial))
            self._partial = None
            if self._replaced is not None:
                try:
                    disk.remove_tree(self._replaced)
                except OSError as error:
                    text = "%s could not be removed (%s); the next training in its directory will."
                    logger.warning(text, self._replaced, error, extra=EVERY_RANK)
        except BaseException:
            self._discard()
            raise
        return self._directory.path / checkpoint_name(self._step)

    # -- the stages ---------------------------------------------------------------------------------------------------

    def _begin(self) -> _Begun | None:
        if not self._writer_group.is_leader:
            return None
        generation = self._directory.next_generation()
        self._partial = self._directory.begin(self._step)
        self._created = SharedFiles(self._partial, self._shared)
        linked = self._created.create()
        return _Begun(self._partial.name, generation, uuid.uuid4().hex, linked)

    def _write(self, partial: Path, files: Iterable[CheckpointFile]) -> tuple[list[FileRecord], list[Any]]:
        writer, shared = CheckpointFileWriter(partial), self._created or SharedFiles(partial, self._shared)
        for file in files:
            if isinstance(file, FallbackFile) and (partial / file.name).exists():
                continue
            unchanged = file if isinstance(file, UnchangedFile) else None
            if unchanged is None or unchanged.stored is None or not writer.link(file.name, unchanged.stored):
                with writer.create(file.name) as stream:
                    file.write(stream)
            if self._shared and isinstance(file, WritesSharedFiles) and not (unchanged and self._linked):
                file.write_shared(shared)
        self.written = writer.records
        return writer.records, list(shared.parts.values())

    def _collect(self, written: Sequence[Sequence[Any]]) -> list[Any] | None:
        """On rank 0: the records of each directory, by its leader. Records of a single directory stay on rank 0."""
        if self._writer_group.nodes == 1:
            self._records = [FileRecord(*record) for records, _ in written for record in records]
            self._parts = [part for _, parts in written for part in parts]
            return None
        by_leader: dict[int, list[Any]] = {}
        for leader, (records, _) in zip(self._writer_group.leaders, written, strict=True):
            by_leader.setdefault(leader, []).extend(records)
        return list(by_leader.items())

    def _write_manifest(self, partial: Path, common: Mapping[str, Any], search: bool) -> None:
        if not self._writer_group.is_leader:
            return
        writer = CheckpointFileWriter(partial)
        self._records += combine_records(self._shared, self._parts, self._linked)
        self.written = self._records
        listed = {record.name for record in self._records}
        present = [path for path in sorted(partial.rglob("*")) if search and path.is_file()]
        for name in (path.relative_to(partial).as_posix() for path in present):
            if name not in listed:
                writer.adopt(name)
        folders = {path.parent for path in (*present, *(partial / name for name in listed))} - {partial}
        for folder in sorted(folders, reverse=True):
            disk.flush_file(folder)
        manifest = Manifest(
            step=self._step,
            node=self._writer_group.node,
            nodes=self._writer_group.nodes,
            written=time.time(),
            versions=versions(),
            files=records_by_name([*self._records, *writer.records]),
            **common,
            **self._metadata,
        )
        manifest.write(writer)
        disk.flush_file(partial)

    def _publish(self, partial: Path) -> None:
        if self._writer_group.is_leader:
            self._replaced = self._directory.publish(partial, self._step)
            record_checkpoint()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _run_stage(
        self, stage: str, act: Callable[[], T], summarize: Callable[[list[T]], Any] = lambda results: None
    ) -> Any:
        """Run ``act()`` on every rank. If it fails on one rank, raise on all.

        Args:
            stage: what ``act`` does, for the error message.
            act: returns plain data.
            summarize: reduces the results of all ranks, on rank 0, to what is broadcast.

        Returns:
            What ``summarize`` returned on rank 0.
        """
        result, failure = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        problem = None if failure is None else (f"{type(failure).__name__}: {failure}", isinstance(failure, OSError))
        results = self._communicator.gather_to_main((result, problem))
        outcome: Any = None
        if results is not None:
            failed = [(rank, *problem) for rank, (_, problem) in enumerate(results) if problem is not None]
            by_disk = all(by_disk for *_, by_disk in failed)
            outcome = (*failed[0][:2], len(failed), by_disk) if failed else summarize([one for one, _ in results])
            outcome = bool(failed), outcome
        has_failed, outcome = self._communicator.broadcast_object(outcome)
        if has_failed:
            rank, text, count, by_disk = outcome
            others = f" (and {count - 1} more)" if count > 1 else ""
            raise SaveFailed(
                f"{checkpoint_name(self._step)} could not be written to {self._directory.path}: rank {rank}{others} "
                f"failed to {stage}: {text}. Earlier checkpoints are unchanged.",
                by_disk=by_disk,
                failed_rank=rank,
            ) from failure
        return outcome

    def _discard(self) -> None:
        """Remove the unfinished directory, and rename a checkpoint that was to be replaced back."""
        if self._partial is None:
            return
        self._partial = None
        try:
            self._directory.tidy()
        except OSError as error:
            text = "%s could not be cleaned up (%s); the next training will."
            logger.warning(text, self._directory.path, error, extra=EVERY_RANK)

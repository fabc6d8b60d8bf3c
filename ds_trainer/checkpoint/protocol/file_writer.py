"""Writes a checkpoint's files: once, front to back, with a running size and checksum, and flushed to disk on close."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.file_records import FileRecord, StoredFile, checksum
from ds_trainer.utils.threads import new_executor

_PARALLEL_CHECKSUM = 2**20  # bytes from which a chunk's checksum is computed in a thread, concurrently with the write
_EARLY_FLUSH = 16 * 2**20  # bytes after which write-back to the disk is started


class CheckpointFileWriter:
    """Writes files into a directory.

    Args:
        directory: an existing directory.

    Attributes:
        records: one for each file written so far.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: list[FileRecord] = []

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a stream to write a new file to, without seeking. On exit, the file is on disk and in the records.

        Raises:
            OSError: the file exists or cannot be written.
        """
        path = self.directory / name
        for folder in reversed(path.relative_to(self.directory).parents):
            if not (self.directory / folder).is_dir():
                disk.make_directory(self.directory / folder)
        stream = _ChecksumStream(disk.open_new(path))
        try:
            yield cast(BinaryIO, stream)
            stream.flush_to_disk()
        finally:
            stream.close()
        if path.parent != self.directory:
            disk.flush_file(path.parent)
        self.records.append(FileRecord(name, stream.size, stream.crc32))

    def link(self, name: str, stored: StoredFile) -> bool:
        """Add a file of an earlier checkpoint as a hard link. Returns whether that succeeded."""
        linked = stored.link(self.directory / name)
        if linked:
            self.records.append(stored.record)
        return linked

    def adopt(self, name: str) -> None:
        """Record a file that other code wrote: read it for its checksum and flush it to disk."""
        path = self.directory / name
        disk.flush_file(path)
        self.records.append(FileRecord(name, path.stat().st_size, checksum(path)))


class _ChecksumStream(io.RawIOBase):
    """A write-only file that tracks its size and checksum."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = 0
        self.crc32 = 0
        self._flush_started = 0  # bytes whose write-back was started
        self._checksum_thread = new_executor("checksum")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        # Both release the GIL, and a checksum takes about as long as a fast disk takes to write.
        pending = (
            self._checksum_thread.submit(zlib.crc32, remaining, self.crc32) if size >= _PARALLEL_CHECKSUM else None
        )
        try:
            if pending is None:
                self.crc32 = zlib.crc32(remaining, self.crc32)
            while len(remaining):
                remaining = remaining[disk.write(self._descriptor, remaining) :]
        finally:
            if pending is not None:
                self.crc32 = pending.result()
        self.size += size
        if self.size - self._flush_started >= _EARLY_FLUSH:
            disk.begin_flush(self._descriptor, self._flush_started, self.size - self._flush_started)
            self._flush_started = self.size
        return size

    def flush_to_disk(self) -> None:
        disk.flush(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._checksum_thread.shutdown()
            disk.close(self._descriptor)

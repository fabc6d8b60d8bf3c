"""Checkpoint files that many ranks write together: each rank writes its own bytes in place.

The leader creates each file at full size before the other ranks write. No rank reads, maps or locks the file: the byte
ranges of the ranks do not overlap, which local and network file systems handle correctly. Each rank checksums its own
bytes, and rank 0 combines the checksums (:mod:`~ds_trainer.checkpoint.protocol.crc32`): one number per rank and file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.crc32 import append_zeros, finalize, register, register_of_rows
from ds_trainer.checkpoint.protocol.file_records import FileRecord, StoredFile
from ds_trainer.utils.threads import new_executor

_PARALLEL_CHECKSUM = 2**20  # bytes from which a chunk's checksum is computed in a thread, concurrently with the write
_EARLY_FLUSH = 16 * 2**20  # bytes after which write-back to the disk is started


class SharedFile(NamedTuple):
    """A file that many ranks write.

    Attributes:
        name: in the checkpoint directory.
        size: bytes, including the header.
        header: the first bytes, written by the rank that creates the file.
        stored: the same file in an earlier checkpoint, if there is one.
    """

    name: str
    size: int
    header: bytes
    stored: StoredFile | None = None


class SharedPart(NamedTuple):
    """What one rank wrote of a shared file: bytes, and the CRC-32 register of the file with all other bytes zero."""

    name: str
    written: int
    register: int


class SharedWriter:
    """One shared file, open for writing."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._checksum_thread = new_executor("checksum")
        self.written = 0
        self.register = 0

    def write(self, offset: int, chunks: Iterable[memoryview]) -> None:
        """Write consecutive ``chunks``, starting at ``offset``."""
        position, value, flushed = offset, 0, offset
        for chunk in chunks:
            # Both release the GIL, and a checksum takes about as long as a fast disk takes to write.
            large = len(chunk) >= _PARALLEL_CHECKSUM
            pending = self._checksum_thread.submit(register, chunk, value) if large else None
            try:
                self._write_at(chunk, position)
            finally:
                value = register(chunk, value) if pending is None else pending.result()
            position += len(chunk)
            if position - flushed >= _EARLY_FLUSH:
                disk.begin_flush(self._descriptor, flushed, position - flushed)
                flushed = position
        self._add(position - offset, value, position)

    def write_rows(self, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
        """Write ``rows`` (``[rows, bytes]``): the first at ``offset``, each next one ``stride`` bytes further."""
        lines = [row.data for row in rows]
        for index, row in enumerate(lines):
            self._write_at(row, offset + index * stride)
        count, width = rows.shape
        self._add(rows.size, register_of_rows(lines, stride), offset + (count - 1) * stride + width)

    def close(self) -> None:
        """Close the file; no more writes."""
        self._checksum_thread.shutdown()
        disk.close(self._descriptor)

    def _write_at(self, data: memoryview, offset: int) -> None:
        while len(data):
            size = disk.write_at(self._descriptor, data, offset)
            data, offset = data[size:], offset + size

    def _add(self, written: int, value: int, end: int) -> None:
        self.written += written
        self.register ^= append_zeros(value, self._size - end)


class SharedFiles:
    """The shared files of one checkpoint, from the view of one rank.

    Args:
        directory: the checkpoint's directory, which exists.
        files: the same on all ranks.

    Attributes:
        parts: what this rank has written, by file.
    """

    def __init__(self, directory: Path, files: Sequence[SharedFile]) -> None:
        self._directory = directory
        self._files = {file.name: file for file in files}
        self.parts: dict[str, SharedPart] = {}

    def create(self) -> list[str]:
        """Create all files at full size. One rank calls this before the others write.

        Returns:
            Names of the files that are links to an earlier checkpoint and must not be written: either all that are
            stored there, or none.

        Raises:
            OSError: a file exists, or the disk is full.
        """
        linked: list[str] = []
        for file in self._files.values():
            if file.stored is None:
                continue
            if not file.stored.link(self._directory / file.name):
                for name in linked:
                    disk.remove_file(self._directory / name)
                linked = []
                break
            linked.append(file.name)
        for file in self._files.values():
            if file.name in linked:
                continue
            descriptor = disk.open_new(self._directory / file.name)
            writer = SharedWriter(descriptor, file.size)
            try:
                disk.resize(descriptor, file.size)
                writer.write(0, [memoryview(file.header)])
                disk.flush(descriptor)
            finally:
                writer.close()
            self._record(file.name, writer)
        return linked

    @contextmanager
    def open(self, name: str) -> Iterator[SharedWriter]:
        """Opens a file for writing in place. On exit, the written bytes are on disk.

        Raises:
            OSError: the file does not exist or cannot be written.
        """
        descriptor = disk.open_shared(self._directory / name)
        writer = SharedWriter(descriptor, self._files[name].size)
        try:
            yield writer
            disk.flush(descriptor)
        finally:
            writer.close()
        self._record(name, writer)

    def _record(self, name: str, writer: SharedWriter) -> None:
        previous = self.parts.get(name, SharedPart(name, 0, 0))
        self.parts[name] = SharedPart(name, previous.written + writer.written, previous.register ^ writer.register)


def combine_records(
    files: Sequence[SharedFile], parts: Iterable[Sequence[Any]], linked: Collection[str] = ()
) -> list[FileRecord]:
    """Returns the records of shared files: of ``linked`` files as stored, of the others from the parts of all ranks.

    Raises:
        ValueError: some bytes of a file were not written, or were written twice.
    """
    stored = [file.stored.record for file in files if file.stored is not None and file.name in linked]
    files = [file for file in files if file.name not in linked]
    written, values = {file.name: 0 for file in files}, {file.name: 0 for file in files}
    for name, size, value in parts:
        written[name] += size
        values[name] ^= value
    for file in files:
        if written[file.name] != file.size:
            raise ValueError(f"{file.name} has {file.size} bytes, but the ranks wrote {written[file.name]}")
    return stored + [FileRecord(file.name, file.size, finalize(values[file.name], file.size)) for file in files]

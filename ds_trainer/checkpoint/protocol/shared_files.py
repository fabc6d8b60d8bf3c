"""Files of a checkpoint that many ranks write together: each rank writes its own bytes in place.

The first rank makes a file at its full size before the others come. No rank reads it, maps it or locks it: ranges of
ranks do not overlap, which local and network file systems alike keep apart. Each rank sums what it writes; rank 0 puts
the sums together (:mod:`~ds_trainer.checkpoint.protocol.crc32`): one number a rank and file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.crc32 import finished, register, register_of_rows, shifted
from ds_trainer.checkpoint.protocol.files import FileRecord, Stored
from ds_trainer.utils.threads import new_executor

_LARGE = 2**20  # bytes from which a part is summed beside its writing
_AHEAD = 16 * 2**20  # bytes after which the disk is told to begin


class SharedFile(NamedTuple):
    """A file that many ranks write.

    Attributes:
        name: in the checkpoint's directory.
        size: bytes, with those of ``head``.
        head: its first bytes, which the rank writes that makes it.
        stored: where all of it lies already, in an earlier checkpoint.
    """

    name: str
    size: int
    head: bytes
    stored: Stored | None = None


class SharedPart(NamedTuple):
    """What a rank wrote of a shared file: how many bytes, and the register of the file if all other bytes are zero."""

    name: str
    written: int
    register: int


class SharedWriter:
    """One shared file, open for writing."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._summer = new_executor("checksum")
        self.written = 0
        self.register = 0

    def write(self, offset: int, chunks: Iterable[memoryview]) -> None:
        """Write ``chunks`` one after the other from ``offset`` on."""
        at, found, begun = offset, 0, offset
        for chunk in chunks:
            # Both let go of Python's lock: summing takes about as long as a fast disk takes to write.
            summed = self._summer.submit(register, chunk, found) if len(chunk) >= _LARGE else None
            try:
                self._write_at(chunk, at)
            finally:
                found = register(chunk, found) if summed is None else summed.result()
            at += len(chunk)
            if at - begun >= _AHEAD:
                disk.begin_flush(self._descriptor, begun, at - begun)
                begun = at
        self._note(at - offset, found, at)

    def write_rows(self, offset: int, apart: int, rows: npt.NDArray[np.uint8]) -> None:
        """Write each of ``rows`` (``[rows, bytes]``), the first at ``offset``, each ``apart`` bytes after the last."""
        lines = [row.data for row in rows]
        for index, row in enumerate(lines):
            self._write_at(row, offset + index * apart)
        count, width = rows.shape
        self._note(rows.size, register_of_rows(lines, apart), offset + (count - 1) * apart + width)

    def close(self) -> None:
        self._summer.shutdown()
        disk.close(self._descriptor)

    def _write_at(self, data: memoryview, offset: int) -> None:
        while len(data):
            size = disk.write_at(self._descriptor, data, offset)
            data, offset = data[size:], offset + size

    def _note(self, written: int, found: int, end: int) -> None:
        self.written += written
        self.register ^= shifted(found, self._size - end)


class SharedFiles:
    """The shared files of one checkpoint, as one rank sees them.

    Args:
        directory: of the checkpoint; it exists.
        files: alike on all ranks.

    Attributes:
        parts: what this rank wrote so far, by file.
    """

    def __init__(self, directory: Path, files: Sequence[SharedFile]) -> None:
        self._directory = directory
        self._files = {file.name: file for file in files}
        self.parts: dict[str, SharedPart] = {}

    def make(self) -> list[str]:
        """Make all files at their full size; one rank does, before the others write.

        Returns:
            Names of those that were linked to, which nobody may write: all that are stored already, or none.

        Raises:
            OSError: one exists, or the disk has no room for it.
        """
        linked: list[str] = []
        offered = [file for file in self._files.values() if file.stored is not None]
        for file in offered:
            if file.stored is None or not file.stored.link(self._directory / file.name):
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
                writer.write(0, [memoryview(file.head)])
                disk.flush(descriptor)
            finally:
                writer.close()
            self._note(file.name, writer)
        return linked

    @contextmanager
    def open(self, name: str) -> Iterator[SharedWriter]:
        """A file to write to in place; on leaving, what was written is on the disk.

        Raises:
            OSError: it is not there, or cannot be written.
        """
        descriptor = disk.open_shared(self._directory / name)
        writer = SharedWriter(descriptor, self._files[name].size)
        try:
            yield writer
            disk.flush(descriptor)
        finally:
            writer.close()
        self._note(name, writer)

    def _note(self, name: str, writer: SharedWriter) -> None:
        before = self.parts.get(name, SharedPart(name, 0, 0))
        self.parts[name] = SharedPart(name, before.written + writer.written, before.register ^ writer.register)


def put_together(
    files: Sequence[SharedFile], parts: Iterable[Sequence[Any]], linked: Collection[str] = ()
) -> list[FileRecord]:
    """The records of shared files, from the parts of all ranks; of those that were ``linked`` as they were stored.

    Raises:
        ValueError: not every byte of a file was written, or some were written twice.
    """
    earlier = [file.stored.record for file in files if file.stored is not None and file.name in linked]
    files = [file for file in files if file.name not in linked]
    written, found = {file.name: 0 for file in files}, {file.name: 0 for file in files}
    for name, size, one in parts:
        written[name] += size
        found[name] ^= one
    for file in files:
        if written[file.name] != file.size:
            raise ValueError(f"{file.name} has {file.size} bytes, and all ranks together wrote {written[file.name]}")
    return earlier + [FileRecord(file.name, file.size, finished(found[file.name], file.size)) for file in files]

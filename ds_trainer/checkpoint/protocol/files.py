"""Files of a checkpoint: written once, front to back, counted and summed on the way, and on the disk at close."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.crc32 import register, shifted
from ds_trainer.utils.threads import new_executor

_CHUNK = 2 * 2**20  # bytes read at a time, into one buffer
_LARGE = 2**20  # bytes from which a part is summed beside its writing
_AHEAD = 16 * 2**20  # bytes after which the disk is told to begin


class FileRecord(NamedTuple):
    """What a manifest says of a file.

    Attributes:
        name: relative to the checkpoint, with ``/``.
        size: bytes.
        crc32: ``zlib.crc32`` of all of them: notices every burst of damage up to 32 bits, and any other with
            probability 1 - 2**-32. It is no protection against somebody who means harm.
    """

    name: str
    size: int
    crc32: int


class Stored(NamedTuple):
    """A file of an earlier checkpoint.

    Attributes:
        path: of the file.
        record: what the manifest beside it says of it.
        head: its first bytes.
    """

    path: Path
    record: FileRecord
    head: bytes

    def link(self, target: Path) -> bool:
        """Give it a second name; whether that could be done."""
        try:
            with self.path.open("rb", buffering=0) as stream:
                if self.path.stat().st_size != self.record.size or stream.read(len(self.head)) != self.head:
                    return False
            disk.link(self.path, target)
        except OSError:  # gone, on another file system, or one without links: it is written anew
            return False
        return True


class CheckpointFiles:
    """Writes files into a directory.

    Args:
        directory: where to; it exists.

    Attributes:
        records: what was written so far.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: list[FileRecord] = []

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """A stream to write a new file to, without seeking; on leaving, the file is on the disk and in the records.

        Raises:
            OSError: it exists, or cannot be written.
        """
        path = self.directory / name
        for folder in reversed(path.relative_to(self.directory).parents):
            if not (self.directory / folder).is_dir():
                disk.make_directory(self.directory / folder)
        stream = _Summing(disk.open_new(path))
        try:
            yield cast(BinaryIO, stream)
            stream.flush_to_disk()
        finally:
            stream.close()
        if path.parent != self.directory:
            disk.flush_file(path.parent)
        self.records.append(FileRecord(name, stream.size, stream.crc32))

    def link(self, name: str, stored: Stored) -> bool:
        """Take in a file of an earlier checkpoint by a second name; whether that could be done."""
        linked = stored.link(self.directory / name)
        if linked:
            self.records.append(stored.record)
        return linked

    def adopt(self, name: str) -> None:
        """Take in a file that was written by something else: it is read, summed and flushed to the disk."""
        path = self.directory / name
        disk.flush_file(path)
        self.records.append(FileRecord(name, path.stat().st_size, checksum(path)))


class _Summing(io.RawIOBase):
    """A file that is only written to, of which size and checksum are known."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = 0
        self.crc32 = 0
        self._begun = 0  # bytes that the disk was told of
        self._summer = new_executor("checksum")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        # Both let go of Python's lock: summing takes about as long as a fast disk takes to write.
        summed = self._summer.submit(zlib.crc32, rest, self.crc32) if size >= _LARGE else None
        try:
            if summed is None:
                self.crc32 = zlib.crc32(rest, self.crc32)
            while len(rest):
                rest = rest[disk.write(self._descriptor, rest) :]
        finally:
            if summed is not None:
                self.crc32 = summed.result()
        self.size += size
        if self.size - self._begun >= _AHEAD:
            disk.begin_flush(self._descriptor, self._begun, self.size - self._begun)
            self._begun = self.size
        return size

    def flush_to_disk(self) -> None:
        disk.flush(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._summer.shutdown()
            disk.close(self._descriptor)


def checksum(path: Path) -> int:
    """``zlib.crc32`` of a file."""
    found, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            found = zlib.crc32(buffer[:count], found)
    return found


def part_of_checksum(path: Path, size: int, index: int, count: int) -> int:
    """The share of the checksum of a file of ``size`` bytes that its ``index``-th of ``count`` parts has.

    The exclusive or of all shares, :func:`~ds_trainer.checkpoint.protocol.crc32.finished`, is :func:`checksum`.
    """
    found, rest = 0, size * (index + 1) // count - size * index // count
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        stream.seek(size * index // count)
        while rest and (read := stream.readinto(buffer[:rest])):
            found, rest = register(buffer[:read], found), rest - read
    return shifted(found, size - size * (index + 1) // count)


def damaged(record: FileRecord, found: int) -> str:
    """That the checksum of a file is another one, as the end of a sentence."""
    return f"{record.name} is damaged (checksum {found:08x} instead of {record.crc32:08x})"


def damage(directory: Path, record: FileRecord, sum_up: bool = True) -> str | None:
    """What is wrong with a file, as the end of a sentence; None where it is as its record says.

    Args:
        directory: of the checkpoint.
        record: what the manifest says of the file.
        sum_up: read it and compare the checksum too, not only the size.
    """
    path = directory / record.name
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{record.name} has {size} bytes instead of {record.size}"
        if sum_up and (found := checksum(path)) != record.crc32:
            return damaged(record, found)
    except FileNotFoundError:
        return f"{record.name} is missing"
    except OSError as error:
        return f"{record.name} cannot be read ({error.strerror or error})"
    return None

"""What a manifest records about a file (size and CRC-32), and how a file on disk is checked against its record."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.crc32 import append_zeros, register

_CHUNK = 2 * 2**20  # bytes read at a time, into one buffer


class FileRecord(NamedTuple):
    """The manifest's entry for a file.

    Attributes:
        name: path relative to the checkpoint, with ``/``.
        size: bytes.
        crc32: ``zlib.crc32`` of the file. It detects every burst error of up to 32 bits, and any other damage with
            probability 1 - 2**-32. It does not protect against deliberate changes.
    """

    name: str
    size: int
    crc32: int


class StoredFile(NamedTuple):
    """A file of an earlier checkpoint.

    Attributes:
        path: the file.
        record: its entry in that checkpoint's manifest.
        header: the first bytes that it must have.
    """

    path: Path
    record: FileRecord
    header: bytes

    def link(self, target: Path) -> bool:
        """Hard-link the file to ``target``. Returns whether that succeeded."""
        try:
            with self.path.open("rb", buffering=0) as stream:
                if self.path.stat().st_size != self.record.size or stream.read(len(self.header)) != self.header:
                    return False
            disk.link(self.path, target)
        except OSError:  # deleted, on another file system, or no hard links here: the caller writes it again
            return False
        return True


def checksum(path: Path) -> int:
    """Returns ``zlib.crc32`` of a file."""
    crc32, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


def partial_checksum(path: Path, size: int, index: int, count: int) -> int:
    """Returns the contribution of part ``index`` of ``count`` to the checksum of a file of ``size`` bytes.

    XOR all contributions and pass the result to :func:`~ds_trainer.checkpoint.protocol.crc32.finalize` to get
    :func:`checksum`.
    """
    value, remaining = 0, size * (index + 1) // count - size * index // count
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        stream.seek(size * index // count)
        while remaining and (read := stream.readinto(buffer[:remaining])):
            value, remaining = register(buffer[:read], value), remaining - read
    return append_zeros(value, size - size * (index + 1) // count)


def describe_mismatch(record: FileRecord, crc32: int) -> str:
    """Describes a checksum mismatch; reads as the end of a sentence."""
    return f"{record.name} is damaged (checksum {crc32:08x} instead of {record.crc32:08x})"


def find_damage(directory: Path, record: FileRecord, compare_checksum: bool = True) -> str | None:
    """Returns what is wrong with a file, worded as the end of a sentence; None if it matches its record.

    Args:
        directory: the checkpoint's directory.
        record: the manifest's entry for the file.
        compare_checksum: read the file and compare its checksum, not only its size.
    """
    path = directory / record.name
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{record.name} has {size} bytes instead of {record.size}"
        if compare_checksum and (crc32 := checksum(path)) != record.crc32:
            return describe_mismatch(record, crc32)
    except FileNotFoundError:
        return f"{record.name} is missing"
    except OSError as error:
        return f"{record.name} cannot be read ({error.strerror or error})"
    return None

"""Files of bytes with a CRC-32 for every block of 64 KiB: written once, and verified block by block when they are read.

A file has the data, then the checksums of its blocks (uint32, little endian). The checksum of these checksums is in the
manifest. A block is verified before a process uses it for the first time, so that opening costs the same for any size,
and yet nothing is used unverified. The kernel reads more than a block around a random access anyway.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import flush

BLOCK = 2**16  # bytes
_WRITTEN_AT_ONCE = 16 * BLOCK
_FULL = (errno.ENOSPC, errno.EDQUOT)

Bytes = npt.NDArray[np.uint8]


class DamagedDataset(ConfigError):
    """A prepared dataset is incomplete, or not what was written."""


class BlockFileRecord(NamedTuple):
    """What the manifest says about a file: bytes of its data, and the CRC-32 of the checksums of its blocks."""

    size: int
    checksum: int

    @property
    def size_on_disk(self) -> int:
        """Bytes of the file: the data and four bytes for each block."""
        return self.size + 4 * -(-self.size // BLOCK)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError inside into words about ``path``.

    Raises:
        ConfigError: something could not be written.
    """
    try:
        yield
    except OSError as error:
        remedy = "Free some space" if error.errno in _FULL else "Make it writable"
        raise ConfigError(
            f"{error.filename or path} cannot be written ({error.strerror or error}), so no data was prepared. "
            f"{remedy}, or prepare to another directory."
        ) from error


class BlockWriter:
    """Writes a new file front to back.

    Args:
        path: the file, which must not exist.

    Attributes:
        size: bytes written so far.

    Raises:
        ConfigError: the file cannot be written; also from the methods.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = bytearray()
        self._checksums: list[int] = []
        self.size = 0
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._pending += data
        self.size += len(data)
        if len(self._pending) >= _WRITTEN_AT_ONCE:
            whole = len(self._pending) // BLOCK * BLOCK
            self._write_blocks(bytes(self._pending[:whole]))
            del self._pending[:whole]

    def finish(self) -> BlockFileRecord:
        """Append the checksums, flush the file to the disk and close it."""
        self._write_blocks(bytes(self._pending))
        checksums = np.asarray(self._checksums, "<u4").tobytes()
        with writing(self._path):
            self._write_all(checksums)
            flush(self._descriptor)
        self.close()
        return BlockFileRecord(self.size, zlib.crc32(checksums))

    def close(self) -> None:
        """Close the file, complete or not."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write_blocks(self, data: bytes) -> None:
        view = memoryview(data)
        self._checksums += [zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK)]
        with writing(self._path):
            self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        remaining = memoryview(data)
        while len(remaining):
            remaining = remaining[os.write(self._descriptor, remaining) :]


class BlockFile:
    """Reads a file of a :class:`BlockWriter`, memory-mapped. It is opened at the first read, and can be pickled.

    Args:
        path: the file.
        record: its entry in the manifest.
    """

    def __init__(self, path: Path, record: BlockFileRecord) -> None:
        self._path, self._record = path, record
        self._data: Bytes | None = None
        self._checksums: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._verified: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "record": self._record}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["record"])  # type: ignore[misc]

    def check_size(self) -> None:
        """Compare the file's size with its record.

        Raises:
            DamagedDataset: it is missing or has another size.
        """
        try:
            size = self._path.stat().st_size
        except OSError as error:
            raise DamagedDataset(f"{self._path} cannot be read ({error.strerror or error}).") from None
        if size != self._record.size_on_disk:
            raise DamagedDataset(f"{self._path} has {size} bytes instead of {self._record.size_on_disk}.")

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes from ``start`` to ``stop``, not copied, uint8 ``[stop - start]``.

        Raises:
            DamagedDataset: a block is not what was written.
        """
        if stop <= start:
            return np.empty(0, np.uint8)
        data = self._map() if self._data is None else self._data
        first, end = start // BLOCK, (stop - 1) // BLOCK + 1
        if not self._verified[first:end].all():
            self._verify(data, first, end)
        return data[start:stop]

    def verify(self) -> None:
        """Verify all blocks. Raises DamagedDataset."""
        self.read(0, self._record.size)

    def _map(self) -> Bytes:
        self.check_size()
        with self._path.open("rb") as stream:
            data: Bytes = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        checksums = data[self._record.size :].tobytes()
        if zlib.crc32(checksums) != self._record.checksum:
            raise DamagedDataset(f"{self._path} is damaged: its checksums are not those that were written.")
        self._checksums = np.frombuffer(checksums, "<u4")
        self._verified = np.zeros(len(self._checksums), np.bool_)
        self._data = data
        return data

    def _verify(self, data: Bytes, first: int, end: int) -> None:
        for block in range(first, end):
            if not self._verified[block]:
                start, stop = block * BLOCK, min((block + 1) * BLOCK, self._record.size)
                if zlib.crc32(data[start:stop].data) != self._checksums[block]:
                    raise DamagedDataset(f"{self._path} is damaged between the bytes {start:,} and {stop:,}.")
                self._verified[block] = True

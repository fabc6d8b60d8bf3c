"""Compressed files, by their last suffix."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_memory import free_host_memory
from ds_trainer.utils.units import human_bytes

MAX_WHOLE_BYTES = 2**30
"""How large a JSON value may be that has to be in memory at once: an object that is the whole file."""
MOST_GROWTH, FREE_GROWTH = 250, 2**26
"""How much larger a compressed file may become, beyond its first 64 MiB. Of texts it is 3 to 30 times."""

READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a file raises if it is missing, protected, truncated or damaged."""


def _open_zstd(packed: IO[bytes]) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"Reading {packed.name} needs pyarrow; install it with pip install 'ds-trainer[hf]'."
        ) from error
    return pyarrow.input_stream(packed, compression="zstd")


_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


class _Decompressed(io.RawIOBase):
    """What a compressed file becomes, as far as it does not grow as no text does: OSError then."""

    def __init__(self, path: Path) -> None:
        self._packed = path.open("rb")
        self._stream = _OPENERS[path.suffix.lower()](self._packed)
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = self._stream.read(len(target))
        self._size += len(data)
        if self._size > max(FREE_GROWTH, MOST_GROWTH * self._packed.tell()):
            text = f"it becomes more than {MOST_GROWTH} times as large as it is; decompress it"
            raise OSError(errno.EFBIG, text)
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._packed.close()
        super().close()


def open_bytes(path: Path) -> IO[bytes]:
    """The content of ``path`` as bytes, decompressed if its name ends with .gz, .bz2, .xz or .zst.

    Raises:
        ConfigError: a library that this needs is not installed.
        OSError: the file cannot be opened.
    """
    return io.BufferedReader(_Decompressed(path), 2**20) if is_compressed(path) else path.open("rb")


def is_compressed(path: Path) -> bool:
    """Whether :func:`open_bytes` decompresses the file."""
    return path.suffix.lower() in _OPENERS


def read_whole(path: Path) -> bytes:
    """The content of a file that has to be in memory at once; OSError if it has too many bytes."""
    most, content = most_bytes(), io.BytesIO()
    with open_bytes(path) as stream:
        while content.tell() <= most and (part := stream.read(2**20)):
            content.write(part)
    if content.tell() > most:
        raise OSError(errno.EFBIG, too_large())
    return content.getvalue()


def most_bytes() -> int:
    """How many bytes a text may have that is one sample or document: its tokens have to be in memory beside it."""
    return free_host_memory() // 4


def too_large() -> str:
    """What is said about a file that :func:`read_whole` refuses."""
    return f"as one text it is larger than a quarter of the free memory ({human_bytes(most_bytes())}); divide it"


def uncompressed_name(name: str) -> str:
    """``x.jsonl.gz``: ``x.jsonl``, in small letters."""
    name = name.lower()
    return next((name.removesuffix(suffix) for suffix in _OPENERS if name.endswith(suffix)), name)


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read, for messages."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"cannot be read: {reason}"

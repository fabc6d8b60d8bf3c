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
from typing import IO, Any, cast

from ds_trainer.utils.errors import ConfigError

MAX_WHOLE_BYTES, MAX_DECOMPRESSED = 2**30, 2**28

READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a file raises if it is missing, protected, truncated or damaged."""


def _open_zstd(path: Path) -> IO[bytes]:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"Reading {path} needs pyarrow; install it with pip install 'ds-trainer[hf]'.") from error
    return cast("IO[bytes]", io.BufferedReader(cast("Any", pyarrow.input_stream(str(path), compression="zstd"))))


_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def open_bytes(path: Path) -> IO[bytes]:
    """The content of ``path`` as bytes, decompressed if its name ends with .gz, .bz2, .xz or .zst.

    Raises:
        ConfigError: a library that this needs is not installed.
        OSError: the file cannot be opened.
    """
    opener = _OPENERS.get(path.suffix.lower())
    return path.open("rb") if opener is None else cast("IO[bytes]", opener(path))


def is_compressed(path: Path) -> bool:
    """Whether :func:`open_bytes` decompresses the file."""
    return path.suffix.lower() in _OPENERS


def read_whole(path: Path) -> bytes:
    """The content of a file that has to be in memory at once; OSError if it has too many bytes."""
    most, parts = MAX_DECOMPRESSED if is_compressed(path) else MAX_WHOLE_BYTES, []
    with open_bytes(path) as stream:
        while most >= 0 and (part := stream.read(2**20)):
            parts.append(part)
            most -= len(part)
    if most < 0:
        raise OSError(errno.EFBIG, too_large(path))
    return b"".join(parts)


def too_large(path: Path) -> str:
    """What is said about a file that :func:`read_whole` refuses."""
    if is_compressed(path):
        return f"it has more than {MAX_DECOMPRESSED // 2**20} MiB once it is decompressed; decompress it"
    return f"it is larger than {MAX_WHOLE_BYTES // 2**20:,} MiB as one value; write one sample per line (jsonl)"


def uncompressed_name(name: str) -> str:
    """``x.jsonl.gz``: ``x.jsonl``, in small letters."""
    name = name.lower()
    return next((name.removesuffix(suffix) for suffix in _OPENERS if name.endswith(suffix)), name)


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read, for messages."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"cannot be read: {reason}"

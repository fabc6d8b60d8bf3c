"""Compressed files, by their last suffix."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from ds_trainer.utils.errors import ConfigError

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


def uncompressed_name(name: str) -> str:
    """``x.jsonl.gz``: ``x.jsonl``, in small letters."""
    name = name.lower()
    return next((name.removesuffix(suffix) for suffix in _OPENERS if name.endswith(suffix)), name)


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read, for messages."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"cannot be read: {reason}"

"""Atomic writes, and reading of files that a user names."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_cannot_flush = False  # said already


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to a temporary file next to ``path``, flush it to the disk and rename it to ``path``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            flush(stream.fileno())
        os.chmod(partial, 0o644)  # mkstemp creates private files; results should be readable by other users
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def flush(descriptor: int) -> None:
    """Wait until everything that was written to a file, or to the entries of a directory, is on disk.

    A mount that cannot do that (directories with some FUSE and SMB servers) is no reason to fail: all that has been
    written is there as long as the machine lives. It is said once.

    Raises:
        OSError: the disk failed.
    """
    global _cannot_flush
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        if not _cannot_flush:
            _cannot_flush = True
            logger.warning(
                "A file system cannot flush files or directories to its disk (fsync: %s). If the machine loses power, "
                "the newest checkpoint may be incomplete; a resume then takes the one before.",
                error.strerror,
            )


def flush_path(path: str | os.PathLike[str]) -> None:
    """:func:`flush` for a file or a directory that is not open."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON value in ``path``."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_user_file(path: str | os.PathLike[str], source: str, kind: str) -> str:
    """The text of a file that the user named, without a byte order mark.

    Args:
        path: as given; ``~`` is the home directory.
        source: how the user named it, the subject of every error: ``"deepspeed=x.json"``, ``"The recipe 'a.yaml'"``.
        kind: the expected kind of file: ``"JSON file"``.

    Raises:
        ConfigError: the file does not exist, is a directory, is not UTF-8 text, or cannot be read.
    """
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source} does not exist (working directory: {Path.cwd()}).") from None
    except IsADirectoryError:
        raise ConfigError(f"{source} is a directory; name a {kind} in it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text (byte {error.start}); is it a {kind}?") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}.") from None

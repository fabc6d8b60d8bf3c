"""Every file operation that creates, renames or deletes a checkpoint.

The protocol uses no other file operations, so a test can stop a process before or after any of them, or make any of
them fail. Each operation is one step: it has happened or it has not.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from ds_trainer.utils import files


def make_directory(path: Path) -> None:
    """Create one directory; its parent must exist."""
    path.mkdir()


def open_new(path: Path) -> int:
    """Create a file that must not exist yet. Returns a descriptor for writing it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)  # less the umask


def open_shared(path: Path) -> int:
    """Open an existing file for writing in place. Returns its descriptor."""
    return os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))


def resize(descriptor: int, size: int) -> None:
    """Set a file's size to ``size`` bytes; bytes that were not written are zero."""
    os.ftruncate(descriptor, size)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write some of ``data`` at ``offset``. Returns the number of bytes written."""
    return os.pwrite(descriptor, data, offset)


def write(descriptor: int, data: memoryview) -> int:
    """Write some of ``data``. Returns the number of bytes written."""
    return os.write(descriptor, data)


def begin_flush(descriptor: int, start: int, size: int) -> None:
    """Start write-back of a range, so that :func:`flush` has less to wait for. Best effort.

    Linux starts to write back dirty pages that are marked as no longer needed; other systems do nothing.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # the file system does not support the hint
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def flush(descriptor: int) -> None:
    """Wait until everything written to the descriptor is on disk."""
    files.flush(descriptor)


def close(descriptor: int) -> None:
    """Close a file."""
    os.close(descriptor)


def flush_file(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    files.flush_path(path)


def link(source: Path, target: Path) -> None:
    """Create a hard link to a file, in the same file system."""
    os.link(source, target)


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory; an existing file of the new name is replaced."""
    os.rename(source, target)


def remove_file(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    path.rmdir()


def check_mounts(path: Path) -> None:
    """Raise OSError if a file system, or another place of this one (a bind mount), is mounted at or below ``path``."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    here = re.sub(r"[\\ \t\n]", lambda found: f"\\{ord(found[0]):03o}", str(path.resolve()))
    for place in (line.split(" ")[4] for line in mounts):
        if place == here or place.startswith(f"{here}/"):
            raise OSError(errno.EBUSY, "A file system is mounted there", place)


def remove_tree(path: Path) -> None:
    """Remove a directory tree, one file at a time; a tree that is already gone is not an error.

    Of symbolic links, ``path`` included, only the link is removed, never what it points at.

    Raises:
        OSError: something is mounted in it (nothing is removed), or a file operation failed.
    """
    if path.is_symlink():
        remove_file(path)
        return
    check_mounts(path)
    try:
        entries = sorted(path.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir():
            remove_tree(entry)
        else:
            remove_file(entry)
    remove_directory(path)

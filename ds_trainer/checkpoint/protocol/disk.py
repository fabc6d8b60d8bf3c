"""Every operation on files by which a checkpoint comes, changes its name and goes.

The protocol calls nothing else, so that a test can stop a process before or after any of them, or let any of them
fail. Each is one step: it has happened or it has not.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def make_directory(path: Path) -> None:
    """Make one directory, whose parent exists."""
    path.mkdir()


def open_new(path: Path) -> int:
    """A descriptor for writing a file that does not exist yet."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)


def open_shared(path: Path) -> int:
    """A descriptor for writing a file that exists, in place."""
    return os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))


def resize(descriptor: int, size: int) -> None:
    """Give a file ``size`` bytes; those that were not written are zero."""
    os.ftruncate(descriptor, size)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write some of ``data`` at ``offset``; how many bytes."""
    return os.pwrite(descriptor, data, offset)


def write(descriptor: int, data: memoryview) -> int:
    """Write some of ``data``; how many bytes."""
    return os.write(descriptor, data)


def begin_flush(descriptor: int, start: int, size: int) -> None:
    """Let the disk begin with what was written, so that :func:`flush` has less to wait for. Promises nothing.

    Linux starts to write dirty pages that it is told are not needed any more; elsewhere nothing happens.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a file system that does not know the hint
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def flush(descriptor: int) -> None:
    """Wait until what was written is on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Close a file."""
    os.close(descriptor)


def flush_file(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, in the same file system."""
    os.link(source, target)


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name; a file of that name is replaced."""
    os.rename(source, target)


def remove_file(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, piece by piece; what is gone already does not matter."""
    try:
        entries = sorted(path.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            remove_file(entry)
    remove_directory(path)

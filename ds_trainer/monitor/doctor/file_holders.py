"""Which files the processes of this machine hold, as far as this user may look (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_FIRST_NAMESPACE = "pid:[4026531836]"  # of the machine itself: the kernel's constant PROC_PID_INIT_INO


def holders(path: Path) -> list[int]:
    """IDs of the processes that have ``path`` open, by inode: inside a container the file may have another name."""
    wanted = path.stat()
    return [pid for pid in psutil.pids() if any(os.path.samestat(wanted, found) for found in _open_files(pid))]


def _open_files(pid: int) -> Iterator[os.stat_result]:
    # Another user's process, or one that has ended, raises an error.
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for descriptor in descriptors:
            with suppress(OSError):  # closed meanwhile
                yield descriptor.stat()


def mapped_files(directory: Path) -> set[str]:
    """Paths below ``directory`` that processes have mapped into their memory."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's process, or one that has ended
            found.update(mapping.path for mapping in process.memory_maps() if mapping.path.startswith(f"{directory}/"))
    return found


def sees_whole_machine() -> bool:
    """Whether this process is in the machine's first PID namespace, so that no process is hidden from it."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    return False

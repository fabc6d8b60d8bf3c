"""Which files the processes of this machine hold, as far as this user may look (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")
_FIRST_NAMESPACE = "pid:[4026531836]"  # of the machine itself, by the kernel's constant PROC_PID_INIT_INO


def processes() -> Iterator[Path]:
    """The directory of each process."""
    if _PROCESSES.is_dir():
        yield from (path for path in _PROCESSES.iterdir() if path.name.isdigit())


def holders(path: Path) -> list[int]:
    """Ids of processes that have ``path`` open."""
    state = path.stat()
    found = []
    for process in processes():
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:
            continue  # another user's, or gone meanwhile
        for descriptor in descriptors:
            try:
                held = descriptor.stat()
            except OSError:
                continue  # closed meanwhile
            if (held.st_dev, held.st_ino) == (state.st_dev, state.st_ino):
                found.append(int(process.name))
                break
    return found


def mapped_files(directory: Path) -> set[str]:
    """Paths below ``directory`` that processes have mapped into their memory."""
    found = set()
    for process in processes():
        try:
            text = (process / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            path = line.split(None, 5)[5:]
            if path and path[0].startswith(f"{directory}/"):
                found.add(path[0])
    return found


def sees_whole_machine() -> bool:
    """Whether no process of this machine is hidden by a container's own list of processes."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def started_at() -> float:
    """When this machine was started, in seconds since 1970; 0 where that is not known."""
    try:
        lines = (_PROCESSES / "stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)

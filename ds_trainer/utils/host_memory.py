"""How much host memory this process may still take: what the machine has free, and what the job's limit leaves.

A batch system (``--mem`` of SLURM) or a container (``--memory`` of docker) limits memory by a cgroup, of which the
numbers of the machine say nothing: who believes those is killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class CgroupMemory(NamedTuple):
    """Limit of a cgroup, in bytes, and what of it is used and cannot be reclaimed."""

    limit: int
    used: int


def free_host_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Bytes of host memory that are free for this process and the others of its machine and job."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_memory(cgroups, own)
    return available if limited is None else max(0, min(available, limited.limit - limited.used))


def cgroup_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> CgroupMemory | None:
    """The cgroup that leaves the least, from this process's own up to the root; None where nothing is limited.

    Pages of files that nobody has used lately count as free, since the kernel drops them first.
    """
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    found: list[CgroupMemory] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names, reclaimable = cgroups, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            reclaimable = "total_inactive_file"
        else:
            continue
        here = root / group.strip("/")
        for directory in [here, *here.parents]:
            limit, used = (_number(directory / name) for name in names)
            if limit is not None:
                found.append(CgroupMemory(limit, max(0, (used or 0) - _statistic(directory, reclaimable))))
            if directory == root:
                break
    return min(found, key=lambda one: one.limit - one.used, default=None)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _statistic(directory: Path, name: str) -> int:
    for line in _text(directory / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # no such controller, or not ours to read: then it limits nothing that we know of
        return ""

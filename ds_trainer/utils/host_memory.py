"""Free host memory: of the machine, and within the memory limit of the job.

A batch system (``--mem`` of SLURM) or a container (``--memory`` of docker) limits memory by a cgroup. The statistics of
the machine do not include that limit, and a process that exceeds it is killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class CgroupMemory(NamedTuple):
    """Memory limit of a cgroup, and the memory in use that cannot be reclaimed; in bytes."""

    limit: int
    used: int


def free_host_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of free host memory on this machine and in this job, for all of their processes."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_memory(cgroups, membership)
    return available if limited is None else max(0, min(available, limited.limit - limited.used))


def total_host_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of host memory that all processes of this job may use on this machine, used or not."""
    total = int(psutil.virtual_memory().total)
    limited = cgroup_memory(cgroups, membership)
    return total if limited is None else min(total, limited.limit)


def cgroup_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> CgroupMemory | None:
    """The cgroup with the least free memory, from that of this process up to the root; None without a limit.

    Inactive pages of files count as free, since the kernel drops them first.
    """
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.is_file() else []
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
    except OSError:  # no such controller, or no permission: no known limit
        return ""

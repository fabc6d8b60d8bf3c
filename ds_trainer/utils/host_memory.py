"""Free host memory: of the machine, and within the memory limit of the job.

A batch system (``--mem`` of SLURM) or a container (``--memory`` of docker) limits memory by a cgroup. The statistics of
the machine do not include that limit, and a process that exceeds it is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = {  # limits, use, and what of the use the kernel drops first
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
_NO_LIMIT = 2**62  # version 1 has no word for it, but a number of pages near 2**63


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
    return min([total, *(one.limit for one in _limited(cgroups, membership))])


def kernel_kills(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """How many processes of this process's cgroups the kernel has killed because memory was exhausted.

    A process that it kills can say nothing; another one compares two counts.
    """
    counts = [
        _statistic(directory / ("memory.events" if version == 2 else "memory.oom_control"), "oom_kill")
        for version, directory in _memory_cgroups(cgroups, membership)
    ]
    return sum(counts)


def killed_for_memory() -> str:
    """The reason that :func:`kernel_kills` has grown, as the end of a sentence."""
    limited = cgroup_memory()
    limit = f": the limit of its cgroup is {limited.limit / 1e9:.2f} GB" if limited is not None else ""
    return f"the kernel killed a process of this job because memory was exhausted{limit}"


def cgroup_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> CgroupMemory | None:
    """The cgroup with the least free memory, from that of this process up to the root; None without a limit.

    Inactive pages of files count as free, since the kernel drops them first.
    """
    return min(_limited(cgroups, membership), key=lambda one: one.limit - one.used, default=None)


def _limited(cgroups: Path, membership: Path) -> Iterator[CgroupMemory]:
    """Those with a limit. Above ``memory.high`` the kernel slows processes until they hardly run: a limit too."""
    for version, directory in _memory_cgroups(cgroups, membership):
        limits, use, reclaimable = _FILES[version]
        numbers = [_number(directory / name) for name in limits]
        if version == 1:  # also of the cgroups above it, which a container does not see
            numbers.append(_statistic(directory / "memory.stat", "hierarchical_memory_limit") or None)
        known = [limit for limit in numbers if limit is not None and limit < _NO_LIMIT]
        if known:
            cached = _statistic(directory / "memory.stat", reclaimable)
            yield CgroupMemory(min(known), max(0, (_number(directory / use) or 0) - cached))


def _memory_cgroups(cgroups: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    """Version and directory of the cgroups that may limit the memory of this process, from its own up to the root."""
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            version, root = 2, cgroups
        elif "memory" in controllers.split(","):
            version, root = 1, cgroups / "memory"
        else:
            continue
        here = root / group.strip("/")
        for directory in [here, *here.parents]:
            yield version, directory
            if directory == root:
                break


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # no such controller, or no permission: no known limit
        return ""

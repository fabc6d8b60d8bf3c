"""Locks of operators that are compiled at first use.

torch compiles an operator in ``<extensions>/<name>/`` and holds a file ``lock`` there open meanwhile
(``torch/utils/file_baton.py``). A process that is killed in the middle leaves it, and every later start waits for it,
for ever and without a word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.monitor.doctor.processes import holders, sees_whole_machine, started_at
from ds_trainer.monitor.units import human_duration

YOUNG_SECONDS = 60.0
"""A lock that was just made may be another machine's, whose clock differs a little."""
QUIET_SECONDS = 1800.0
"""No single file takes longer to compile: a directory in which nothing happened for so long is not worked in."""
_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse", "smb", "cifs", "9p", "wekafs", "panfs", "afs")


@dataclass(frozen=True)
class JitLock:
    """A lock that was found.

    Attributes:
        path: the file.
        seconds: since the last sign of work in its directory.
        held_by: processes of this machine that hold it.
        certain: whether nobody can hold it: it is older than the machine's start, or all processes that could were
            looked at; on a file system of this machine, by its owner.
    """

    path: Path
    seconds: float
    held_by: tuple[int, ...]
    certain: bool

    @property
    def stale(self) -> bool:
        """Whether it was left behind, as far as can be told."""
        return not self.held_by and (self.certain or self.seconds > QUIET_SECONDS)


def extensions_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Where torch compiles: ``TORCH_EXTENSIONS_DIR``, or the cache of the user."""
    environment = os.environ if environment is None else environment
    given = environment.get("TORCH_EXTENSIONS_DIR")
    root = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if given else Path(root) / "torch_extensions"


def find_locks(directory: Path) -> list[JitLock]:
    """All locks below the extensions' directory, with or without a level for the versions."""
    found = []
    for path in sorted([*directory.glob("*/lock"), *directory.glob("*/*/lock")]):
        try:
            found.append(_looked_at(path))
        except FileNotFoundError:
            continue  # released meanwhile
    return found


def _looked_at(path: Path) -> JitLock:
    now, state = time.time(), path.stat()
    quiet = now - max(entry.stat().st_mtime for entry in [path, *path.parent.iterdir()])
    held = tuple(holders(path))
    own = state.st_uid == os.getuid() and not on_network(path)
    gone = sees_whole_machine() and now - state.st_mtime > YOUNG_SECONDS
    before_start = state.st_mtime < started_at() - YOUNG_SECONDS
    return JitLock(path, quiet, held, own and not held and (gone or before_start))


def on_network(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether other machines may see the file too; True where that cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    where, best, kind = str(path.resolve()), "", ""
    for line in lines:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return not best or kind.split(".")[0] in _NETWORK


def lock_findings(directory: Path) -> list[Finding]:
    """A finding for each lock; one that says so where there is none."""
    found = []
    for lock in find_locks(directory):
        name, quiet = f"lock of {lock.path.parent.name}", human_duration(max(0.0, lock.seconds))
        if lock.held_by:
            pids = ", ".join(map(str, lock.held_by))
            found.append(Finding(Level.OK, name, f"process {pids} is compiling"))
        elif lock.stale:
            said = f"{lock.path} was left behind ({quiet} without work, nobody holds it): starts wait for it for ever"
            found.append(Finding(Level.FAIL, name, said, f"rm {lock.path}"))
        else:
            said = f"{lock.path}: no process of this machine holds it, last sign of work {quiet} ago"
            remedy = f"If nobody compiles on another machine or in another container: rm {lock.path}"
            found.append(Finding(Level.WARN, name, said, remedy))
    return found or [Finding(Level.OK, "locks of operators", f"none in {directory}")]


def remove_certain(directory: Path) -> tuple[list[JitLock], list[JitLock]]:
    """Remove locks that certainly nobody holds; gives those, and others that nobody of this machine holds."""
    removed, left = [], []
    for lock in find_locks(directory):
        if lock.certain and lock.stale:
            lock.path.unlink(missing_ok=True)
            removed.append(lock)
        elif not lock.held_by:
            left.append(lock)
    return removed, left

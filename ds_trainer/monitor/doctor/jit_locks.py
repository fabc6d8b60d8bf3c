"""Locks of operators that are compiled at first use.

torch compiles an operator in ``<extensions>/<name>/`` and holds a file ``lock`` there open during the compilation
(``torch/utils/file_baton.py``). A process that is killed during this time leaves the file behind, and every later start
waits for it without any message, forever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.utils.compiler_caches import on_network
from ds_trainer.utils.units import human_duration

YOUNG_SECONDS = 60.0
"""A new lock may belong to another machine, whose clock differs a little."""
QUIET_SECONDS = 1800.0
"""No single file takes longer to compile, so there is no compilation in a directory without changes for this time."""


@dataclass(frozen=True)
class JitLock:
    """A lock that was found.

    Attributes:
        path: the file.
        seconds: since the last change in its directory.
        held_by: processes of this machine that hold it.
        certain: whether it is certain that no process holds it: the file is this user's, on a file system of this
            machine, and it is older than the machine's last boot or all processes of the machine were checked.
    """

    path: Path
    seconds: float
    held_by: tuple[int, ...]
    certain: bool

    @property
    def stale(self) -> bool:
        """Whether it was left behind, as far as this can be determined."""
        return not self.held_by and (self.certain or self.seconds > QUIET_SECONDS)


def extensions_directory(environment: Mapping[str, str] | None = None) -> Path:
    """The directory in which torch compiles: ``TORCH_EXTENSIONS_DIR``, or one in the user's cache."""
    environment = os.environ if environment is None else environment
    configured = environment.get("TORCH_EXTENSIONS_DIR")
    root = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(configured) if configured else Path(root) / "torch_extensions"


def find_locks(directory: Path) -> list[JitLock]:
    """All locks below the extensions directory, with or without a subdirectory per version."""
    jit_locks = []
    for path in sorted([*directory.glob("*/lock"), *directory.glob("*/*/lock")]):
        try:
            jit_locks.append(_inspect(path))
        except FileNotFoundError:
            continue  # released in the meantime
    return jit_locks


def _inspect(path: Path) -> JitLock:
    now, state = time.time(), path.stat()
    quiet = now - max(entry.stat().st_mtime for entry in [path, *path.parent.iterdir()])
    held = tuple(holders(path))
    local = state.st_uid == os.getuid() and not on_network(path)
    all_checked = sees_whole_machine() and now - state.st_mtime > YOUNG_SECONDS
    before_boot = state.st_mtime < psutil.boot_time() - YOUNG_SECONDS
    return JitLock(path, quiet, held, local and not held and (all_checked or before_boot))


def lock_findings(directory: Path) -> list[Finding]:
    """One finding per lock, or one that says that there is none."""
    findings = []
    for lock in find_locks(directory):
        name, quiet = f"lock of {lock.path.parent.name}", human_duration(max(0.0, lock.seconds))
        if lock.held_by:
            pids = ", ".join(map(str, lock.held_by))
            findings.append(Finding(Level.OK, name, f"process {pids} is compiling"))
        elif lock.stale:
            message = f"{lock.path} is stale (no change for {quiet}, no process holds it): every start waits for it"
            findings.append(Finding(Level.FAIL, name, message, f"rm {lock.path}"))
        else:
            message = f"{lock.path}: no process of this machine holds it; last change {quiet} ago"
            remedy = f"If nothing is being compiled on another machine or in another container: rm {lock.path}"
            findings.append(Finding(Level.WARN, name, message, remedy))
    return findings or [Finding(Level.OK, "locks of operators", f"none in {directory}")]


def remove_certain(directory: Path) -> tuple[list[JitLock], list[JitLock]]:
    """Remove the locks that certainly no process holds.

    Returns:
        The removed locks, and the others that no process of this machine holds.
    """
    removed, left = [], []
    for lock in find_locks(directory):
        if lock.certain and lock.stale:
            lock.path.unlink(missing_ok=True)
            removed.append(lock)
        elif not lock.held_by:
            left.append(lock)
    return removed, left


# Which files the processes of this machine hold, as far as this user may look (Linux).


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
    files: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's process, or one that has ended
            files.update(mapping.path for mapping in process.memory_maps() if mapping.path.startswith(f"{directory}/"))
    return files


def sees_whole_machine() -> bool:
    """Whether this process is in the machine's first PID namespace, so that no process is hidden from it."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    return False

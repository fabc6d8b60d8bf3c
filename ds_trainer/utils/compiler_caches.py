"""Where Triton and torch's inductor keep what they compile: on a disk of this machine.

Triton's default is ``~/.triton``. Where the home directory is a network file system, the processes of all machines
write there at once: cold starts end with "Stale file handle" (triton issue 2688, pytorch issue 173679). Inductor's
default is in the temporary directory, which ``TMPDIR`` may put on such a file system too.
"""

from __future__ import annotations

import getpass
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse", "smb", "cifs", "9p", "wekafs", "panfs", "afs")
_LITTLE = 2**28  # bytes; the caches of a run take less


def on_network(path: Path) -> bool:
    """Whether other machines may see the file too; True if its file system is unknown."""
    path = path.resolve()  # first: it may mount the file system
    try:
        partitions = psutil.disk_partitions(all=True)
    except OSError:  # a container that hides /proc
        return True
    mounts = [mount for mount in partitions if path.is_relative_to(mount.mountpoint)]
    if not mounts:
        return True
    innermost = sorted(mounts, key=lambda mount: len(mount.mountpoint))[-1]  # of equals, the last one is visible
    return innermost.fstype.split(".")[0] in _NETWORK


def compiler_caches(environment: Mapping[str, str]) -> dict[str, Path]:
    """The directories of Triton and of inductor, by the environment variable that sets each."""
    home = environment.get("TRITON_HOME") or os.path.expanduser("~")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        user = f"uid_{os.getuid()}"
    defaults = {
        "TRITON_CACHE_DIR": Path(home) / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{user}",
    }
    return {name: Path(environment.get(name) or default) for name, default in defaults.items()}


def local_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that nothing is compiled on a network file system. Those that the user has set stay."""
    chosen = [name for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR") if environment.get(name)]
    if environment.get("TRITON_HOME"):
        chosen.append("TRITON_CACHE_DIR")
    remote = [name for name, path in compiler_caches(environment).items() if name not in chosen and on_network(path)]
    directory = _own_directory() if remote else None
    if directory is None:
        return {}
    return {name: str(directory / name.split("_")[0].lower()) for name in remote}


def _own_directory() -> Path | None:
    """A directory on a disk of this machine to which no other user can write: what is in it will be run."""
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        path = Path(parent) / f"ds_trainer-{os.getuid()}"
        try:
            disk = os.statvfs(parent)
            usable = not disk.f_flag & (os.ST_NOEXEC | os.ST_RDONLY) and disk.f_bavail * disk.f_frsize >= _LITTLE
            if not usable or on_network(path):
                continue
            path.mkdir(mode=0o700, exist_ok=True)
            state = path.lstat()
        except OSError:
            continue  # the next one may serve
        private = not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and private:
            return path
    return None

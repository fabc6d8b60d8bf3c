"""One training at a time in an output directory: two would write over each other's checkpoints and records."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

LOCK_FILE = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_POLL_SECONDS = 0.2


class DirectoryLock:
    """A lock on a directory, held by this process until it is released or the process ends, in whatever way.

    It is a lock of the operating system on the file ``.lock`` (``fcntl.lockf``), which shared file systems know too;
    where one does not, there is a warning and no lock. A file that a killed process left behind locks nothing.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self, patience: float = 0.0) -> str | None:
        """Take the lock; the directory is made if it is missing.

        Args:
            patience: seconds to wait for whoever has it.

        Returns:
            None where it was taken, or cannot be; else who has it.

        Raises:
            OSError: the directory cannot be made, or not be written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + patience
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _described(descriptor)
                os.close(descriptor)
                if error.errno in _TAKEN:
                    if time.monotonic() >= deadline:
                        return holder
                    time.sleep(_POLL_SECONDS)
                    continue
                logger.warning(
                    "%s cannot be locked on this file system (%s): take care that no other training writes to %s.",
                    self._path,
                    error.strerror,
                    self._path.parent,
                )
                return None
            if self._is_ours(descriptor):
                break
            os.close(descriptor)  # its holder removed it in the meantime
        holder_facts = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder_facts).encode())
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        """Give it back; without effect where it was not taken."""
        if self._descriptor is None:
            return
        if self._is_ours(self._descriptor):
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def _is_ours(self, descriptor: int) -> bool:
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))


def _described(descriptor: int) -> str:
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["since"]))
        return f"process {facts['process']} on {facts['host']} since {since}"
    except (ValueError, KeyError, TypeError):  # it has just been taken
        return "another process"

"""Allows one training at a time in an output directory: two would overwrite each other's checkpoints and records."""

from __future__ import annotations

import errno
import inspect
import json
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout
from filelock import __version__ as filelock_version

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import EVERY_RANK, get_logger

logger = get_logger(__name__)

LOCK_FILE = ".lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_SECONDS = 0.2


class _FileReplaced(Exception):
    """The locked file no longer has the name ``.lock``: its holder removed it before this process got the lock."""


class DirectoryLock:
    """A lock on a directory. This process holds it until it releases the lock or ends, in whatever way.

    It is an operating system lock on the file ``.lock`` (:class:`filelock.FileLock`: ``flock``, which Linux NFS clients
    turn into a lock on the server). If the file system does not support locks, there is a warning and no lock. A file
    that a killed process left behind does not lock anything.

    Raises:
        ConfigError: filelock is older than 3.30, which ignores keywords that it does not know.
    """

    def __init__(self, directory: Path) -> None:
        unknown = {"fallback_to_soft", "on_acquired"} - inspect.signature(FileLock.__init__).parameters.keys()
        if unknown:
            raise ConfigError(
                f"filelock {filelock_version} is installed, which ignores {', '.join(sorted(unknown))}: two trainings "
                "could write to one directory. Install a newer one: pip install 'filelock>=4.1'."
            )
        self._path = directory / LOCK_FILE
        # No fallback to a lock by existence: a killed process would leave its directory locked.
        self._lock = FileLock(
            self._path,
            thread_local=False,
            poll_interval=_POLL_SECONDS,
            fallback_to_soft=False,
            on_acquired=self._write_holder,
        )

    def acquire(self, timeout: float = 0.0) -> str | None:
        """Take the lock. Creates the directory if it is missing.

        Args:
            timeout: seconds to wait for the current holder.

        Returns:
            None if the lock was taken, or if locks are not supported here; otherwise a description of the holder.

        Raises:
            OSError: the directory cannot be created or written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                self._lock.acquire(timeout=timeout)
            except _FileReplaced:
                continue
            except Timeout:
                if self._path.exists():
                    return self._describe_holder()
                continue  # the holder released the lock in the meantime
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                logger.warning(
                    "%s cannot be locked on this file system (%s): make sure that no other training writes to %s.",
                    self._path,
                    error.strerror,
                    self._path.parent,
                    extra=EVERY_RANK,
                )
            return None

    def release(self) -> None:
        """Release the lock and remove its file. Does nothing if the lock is not held."""
        if self._lock.is_locked:
            self._path.unlink(missing_ok=True)
            self._lock.release()

    def _write_holder(self, descriptor: int) -> None:
        try:
            current = os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            current = False
        if not current:
            raise _FileReplaced
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder).encode())

    def _describe_holder(self) -> str:
        try:
            holder = json.loads(self._path.read_text(encoding="utf-8"))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            return f"process {holder['process']} on {holder['host']} since {since}"
        except (OSError, ValueError, KeyError, TypeError):  # the holder has just taken or released the lock
            return "another process"

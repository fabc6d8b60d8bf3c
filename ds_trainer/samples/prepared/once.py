"""``made_once``: one process makes something in a directory, and all others wait for it without a collective.

The processes may be ranks of one job, or jobs that know nothing of each other, on one machine or on many: those that
share the directory share a lock file in it. So on a shared file system one process of all makes it, and on local disks
one of each node.

The lock is one of the operating system (``flock``): it ends with its process. A file system without locks gets a lock
by existence. While the holder works, it rewrites a file beside the lock every few seconds. If that stops, the others
name the holder, remove the lock file and go on: this covers a lock that outlives its host (NFS 3), and locks by
existence. Two processes may then make the same thing. That costs time only: each writes beside the final name and
renames, so the result is whole.

One waiting process of a machine looks at the shared directory, so the load of a file system grows with the machines,
not with the ranks; the others look once in ``Waiting.stale`` seconds, in case that one is stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from ds_trainer.samples.prepared.block_file import writing
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import flush_path, new_partial, parse_json
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.threads import new_thread

logger = get_logger(__name__)

Made = TypeVar("Made")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Waiting:
    """Times in seconds.

    Attributes:
        poll: between two looks, at first; the longer it takes the more, up to ten times as much.
        beat: between two signs of life of the process that works.
        stale: without a sign of life, after which it is taken for dead.
        report: between two log lines of a process that waits.
        head_start: how much earlier the first rank of a node begins, so that it works rather than another one.
    """

    poll: float = 0.5
    beat: float = 5.0
    stale: float = 60.0
    report: float = 60.0
    head_start: float = 3.0


class WriterHeartbeat:
    """Signs of life of the process that works: a file that a thread rewrites.

    Args:
        path: the file.
        every: seconds.

    Attributes:
        doing: what the others read in their logs.
    """

    def __init__(self, path: Path, every: float) -> None:
        self._path, self._every = path, every
        self._values = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        self._stop = threading.Event()
        self._thread = new_thread(self._run, name="heartbeat")
        self.doing = "starting"

    def __enter__(self) -> WriterHeartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        beat = 0
        while not self._stop.is_set():
            beat += 1
            text = json.dumps({**self._values, "beat": beat, "doing": self.doing})
            with suppress(OSError):  # a full disk: the work itself will say so
                self._path.write_text(text, encoding="utf-8")
            self._stop.wait(self._every)


class _Holder:
    """The process that holds the lock, as another one sees it: only this one's clock counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[Any, ...] | None = None
        self._changed = time.monotonic()
        self.values: dict[str, Any] = {}

    def silent_for(self, lock: Path) -> float:
        """Seconds since the last sign of life."""
        with suppress(OSError, ValueError):  # there is none, or it is being written
            self.values = parse_json(self._path.read_text(encoding="utf-8"))
        try:
            inode = lock.stat().st_ino
        except OSError:
            inode = None
        seen = (inode, self.values.get("host"), self.values.get("process"), self.values.get("beat"))
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        return time.monotonic() - self._changed

    def remove(self, lock: Path) -> None:
        """Remove the lock file and the last sign of life, unless somebody else has the lock by now."""
        with suppress(OSError):
            if self._seen is not None and lock.stat().st_ino == self._seen[0]:
                lock.unlink()
                self._path.unlink(missing_ok=True)

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return bool(self.values.get("host") == socket.gethostname())

    def __str__(self) -> str:
        values = self.values
        return f"process {values['process']} on {values['host']}" if "process" in values else "another process"


class _Lookout:
    """Selects the process that looks at the shared directory for its machine; the others wait for its end.

    A name of this machine that only one process can have, without a file; it ends with its process. Where there are
    no such names, every process looks.
    """

    def __init__(self, target: Path) -> None:
        name = f"{os.getuid()}/{target.absolute()}"
        self._address = b"\0ds_trainer/once/" + hashlib.sha256(name.encode()).hexdigest().encode()
        self._socket = socket.socket(socket.AF_UNIX)
        self._here = False

    def wait(self, pause: float, longest: float) -> None:
        """Wait until the next look: ``pause`` seconds, or up to ``longest`` while another process looks."""
        deadline = time.monotonic() + longest
        while not self._here and time.monotonic() < deadline:
            time.sleep(pause)
            try:
                self._socket.bind(self._address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
            self._here = True
            return
        if self._here:
            time.sleep(pause)

    def close(self) -> None:
        """Let another process look."""
        self._socket.close()


def made_once(
    target: Path, find: Callable[[], Made | None], make: Callable[[WriterHeartbeat], Made], waiting: Waiting = Waiting()
) -> Made:
    """What ``find`` returns, made by ``make`` in one process if it is not there.

    Args:
        target: file or directory that appears when it is made; lock and signs of life are hidden files beside it.
        find: returns it, or None; it is called often, so it is quick if ``target`` does not exist.
        make: makes and returns it; it may be called although another process makes the same at that time.
        waiting: times.

    Raises:
        ConfigError: the lock file cannot be written.
    """
    result = find()
    if result is not None:
        return result
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    with closing(_Lookout(target)) as lookout:
        return _made(target, find, make, waiting, lookout)


def _made(
    target: Path,
    find: Callable[[], Made | None],
    make: Callable[[WriterHeartbeat], Made],
    waiting: Waiting,
    lookout: _Lookout,
) -> Made:
    lock_path = target.parent / f".{target.name}.lock"
    beat_path = target.parent / f".{target.name}.writer"
    lock = FileLock(lock_path, thread_local=False)
    holder, leads = _Holder(beat_path), _local_rank() == 0
    began = reported = time.monotonic()
    while True:
        waited = time.monotonic() - began
        if not (leads or waited > waiting.head_start) or not _acquired(lock):
            silent = holder.silent_for(lock_path)
            if silent > waiting.stale:
                text = "%s: %s gave no sign of life for %d s and is taken for dead."
                logger.warning(text, target, holder, silent, extra=EVERY_RANK)
                holder.remove(lock_path)
            elif time.monotonic() - reported > waiting.report:
                reported = time.monotonic()
                doing = holder.values.get("doing", "at work")
                log = logger.warning if leads else logger.debug  # once per machine, or once if all wait for another one
                log("Waiting for %s: %s is %s.", target, holder, doing, extra=EVERY_RANK if holder.is_here else None)
            lookout.wait(min(waiting.poll + 0.02 * waited, 10 * waiting.poll), waiting.stale)
            result = find() if target.exists() else None
            if result is not None:
                return result
            continue
        try:
            result = find()
            if result is not None:
                return result
            if beat_path.exists():
                holder.silent_for(lock_path)
                text = "%s ended before %s was complete; it is made again."
                logger.warning(text, str(holder).capitalize(), target, extra=EVERY_RANK)
            lookout.close()
            with WriterHeartbeat(beat_path, waiting.beat) as heartbeat:
                return make(heartbeat)
        finally:
            if lock.is_locked:
                lock_path.unlink(missing_ok=True)
                lock.release()


@contextmanager
def published(final: Path, is_whole: Callable[[], bool]) -> Iterator[Path]:
    """A new directory to write to. After the block it is flushed and renamed: it exists whole or not at all.

    Args:
        final: the name of the directory.
        is_whole: whether what has that name is complete: then another process was first, with the same content.
            Anything else is replaced.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(final):
        partial = new_partial(final)
    try:
        yield partial
        with writing(final):
            flush_path(partial)
            if final.exists() and not is_whole():
                damaged = partial.with_suffix(".damaged")
                final.rename(damaged)
                shutil.rmtree(damaged, ignore_errors=True)
            try:
                partial.rename(final)
            except OSError:
                if not is_whole():
                    raise
            flush_path(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _acquired(lock: FileLock) -> bool:
    """Whether this process may work: it took the lock, or there are none here, which costs time only."""
    try:
        lock.acquire(timeout=0)
    except Timeout:  # which is an OSError
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            with writing(Path(lock.lock_file)):
                raise
        logger.warning("%s cannot be locked here (%s): other processes may do the same work.", lock.lock_file, error)
    return True


def _local_rank() -> int:
    try:
        return resolve_ranks(os.environ).local_rank
    except ConfigError:
        return 0  # reported where the process group is made

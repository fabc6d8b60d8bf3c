"""Two trainings in one directory: the second is refused, and learns who has it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.checkpoint.protocol.lock import LOCK_FILE, DirectoryLock


@contextmanager
def held_by_another(directory: Path) -> Iterator[int]:
    """A forked process that holds the lock."""
    ready, tell = os.pipe()
    process = os.fork()
    if process == 0:
        DirectoryLock(directory).acquire()
        os.write(tell, b"!")
        time.sleep(120)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(ready)
        os.close(tell)


def test_the_second_is_told_who_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    lock = DirectoryLock(directory)
    with held_by_another(directory) as process:
        said = lock.acquire()
        assert said is not None and f"process {process} on {socket.gethostname()} since 20" in said
        lock.release()  # of nothing
        assert (directory / LOCK_FILE).exists()
    assert lock.acquire() is None  # the other was killed: its file locks nothing
    lock.release()
    assert not list(directory.iterdir())


def test_a_lock_is_for_one_training_at_a_time(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    for _ in range(2):
        assert lock.acquire() is None
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, (DirectoryLock(tmp_path).acquire() or "none").encode())
            os._exit(0)
        os.wait()
        assert f"process {os.getpid()}" in os.read(reading, 200).decode()
        lock.release()


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the holder gives it back: the file opened has no name any more."""
    original, path, calls = fcntl.lockf, tmp_path / LOCK_FILE, 0

    def lockf(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            path.unlink()
        return original(*arguments)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = DirectoryLock(tmp_path)
    assert lock.acquire() is None and calls == 2
    assert path.exists()
    lock.release()
    assert not path.exists()


def test_without_locks_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    logging.getLogger("ds_trainer").propagate = True
    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = DirectoryLock(tmp_path)
    assert lock.acquire() is None
    assert "cannot be locked on this file system (No locks available)" in caplog.text
    lock.release()

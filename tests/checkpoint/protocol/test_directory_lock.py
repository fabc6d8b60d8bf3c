"""Two trainings in one directory: the second is rejected, with a description of the first."""

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
from filelock import FileLock

from ds_trainer.training.resume import output_directory
from ds_trainer.training.resume.output_directory import LOCK_FILE, DirectoryLock
from ds_trainer.utils.errors import ConfigError


@contextmanager
def held_by_another(directory: Path) -> Iterator[int]:
    """A forked process that holds the lock."""
    ready, signal_ready = os.pipe()
    process = os.fork()
    if process == 0:
        DirectoryLock(directory).acquire()
        os.write(signal_ready, b"!")
        time.sleep(120)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(ready)
        os.close(signal_ready)


def test_the_holder_is_described(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    lock = DirectoryLock(directory)
    with held_by_another(directory) as process:
        holder = lock.acquire()
        assert holder is not None and f"process {process} on {socket.gethostname()} since 20" in holder
        lock.release()  # not held: no effect
        assert (directory / LOCK_FILE).exists()
    assert lock.acquire() is None  # the other process was killed: its file locks nothing
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


def test_a_removed_lock_file_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the holder releases the lock: the opened file no longer has a name."""
    original, path, calls = fcntl.flock, tmp_path / LOCK_FILE, 0

    def flock(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            path.unlink()
        return original(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = DirectoryLock(tmp_path)
    assert lock.acquire() is None and calls == 2
    assert path.exists()
    lock.release()
    assert not path.exists()


def test_missing_lock_support_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    logging.getLogger("ds_trainer").propagate = True
    monkeypatch.setattr(fcntl, "flock", flock)
    lock = DirectoryLock(tmp_path)
    assert lock.acquire() is None
    assert "cannot be locked on this file system (No locks available)" in caplog.text
    lock.release()


def test_an_old_filelock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock 3.18 drops keywords that its constructor does not have, without a word."""

    class Old(FileLock):
        def __init__(self, lock_file: Any, timeout: float = -1, mode: int = 0o644, thread_local: bool = True) -> None:
            super().__init__(lock_file, timeout, mode, thread_local)

    monkeypatch.setattr(output_directory, "FileLock", Old)
    with pytest.raises(ConfigError, match=r"which ignores fallback_to_soft, on_acquired.*'filelock>=4\.1'"):
        DirectoryLock(tmp_path)
    assert '"filelock>=4.1"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()

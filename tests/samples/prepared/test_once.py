"""One process makes, the others wait: with locks, without, and if the one that makes ends."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from ds_trainer.samples.prepared import once
from ds_trainer.samples.prepared.once import Waiting, WriterHeartbeat, made_once

QUICK = Waiting(poll=0.02, beat=0.05, stale=0.6, report=0.1, head_start=0.0)
FORK = multiprocessing.get_context("fork")


def counted(target: Path, seconds: float | Callable[[], bool] = 0.2) -> str:
    """Make a file once, in so many seconds or as soon as something holds, and note in another file who did."""

    def make(heartbeat: WriterHeartbeat) -> str:
        heartbeat.doing = "writing"
        with (target.parent / "calls").open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        wait_until(seconds) if callable(seconds) else time.sleep(seconds)
        beside = target.with_suffix(f".{os.getpid()}")
        beside.write_text("made")
        beside.rename(target)
        return "made"

    return made_once(target, lambda: target.read_text() if target.exists() else None, make, QUICK)


def run(target: Path, seconds: float | Callable[[], bool], answers: Any) -> None:
    answers.put(counted(target, seconds))


def calls(target: Path) -> int:
    return len((target.parent / "calls").read_text().splitlines())


def start(count: int, target: Path, seconds: float | Callable[[], bool] = 0.2) -> tuple[list[Any], Any]:
    answers = FORK.SimpleQueue()
    processes = [FORK.Process(target=run, args=(target, seconds, answers), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    return processes, answers


def ended(processes: list[Any]) -> list[int]:
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_of_six_processes_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "it"
    processes, answers = start(6, target)
    assert ended(processes) == [0] * 6
    assert [answers.get() for _ in range(6)] == ["made"] * 6
    assert calls(target) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls", "it"]  # no lock, no sign of life


def test_one_process_of_a_machine_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its end without a look at the directory, which may be on a shared disk."""
    target, looks = tmp_path / "it", tmp_path / "looks"
    look = once._Holder.silent_for

    def noted(holder: Any, lock: Path) -> float:
        with looks.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return look(holder, lock)

    def numbers() -> list[int]:
        pids = looks.read_text().split() if looks.exists() else []
        return sorted(pids.count(pid) for pid in set(pids))

    monkeypatch.setattr(once._Holder, "silent_for", noted)
    monkeypatch.setattr(sys.modules[__name__], "QUICK", replace(QUICK, stale=600.0))
    processes, _ = start(6, target, lambda: len(numbers()) == 5 and numbers()[-1] > 8)
    assert ended(processes) == [0] * 6 and calls(target) == 1
    assert numbers()[:-1] == [1] * 4, numbers()


def test_if_it_is_killed_another_one_goes_on_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "it"
    (first,), _ = start(1, target, seconds=600)
    wait_until((tmp_path / ".it.writer").exists)
    wait_until((tmp_path / "calls").exists)
    threading.Timer(0.3, os.kill, (first.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    assert counted(target) == "made"
    assert time.monotonic() - began < 120
    assert calls(target) == 2
    assert f"Waiting for {target}: process {first.pid} on " in caplog.text and " is writing." in caplog.text
    assert f"process {first.pid} on " in caplog.text and "it is made again" in caplog.text.lower()
    first.join()


def test_a_holder_that_stopped_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The lock stays: as that of a host that died, on NFS 3. When it goes on, it still publishes something whole."""
    target = tmp_path / "it"
    (first,), answers = start(1, target, seconds=0.5)
    wait_until((tmp_path / ".it.writer").exists)
    os.kill(first.pid, signal.SIGSTOP)
    assert counted(target, 0.1) == "made"
    assert f"process {first.pid} on " in caplog.text and "gave no sign of life" in caplog.text
    os.kill(first.pid, signal.SIGCONT)
    assert ended([first]) == [0]
    assert answers.get() == target.read_text() == "made"


def test_a_slow_holder_is_waited_for_as_long_as_it_gives_signs_of_life(tmp_path: Path) -> None:
    target = tmp_path / "it"
    (first,), _ = start(1, target, seconds=4 * QUICK.stale)
    wait_until((tmp_path / "calls").exists)
    assert counted(target) == "made"
    assert ended([first]) == [0]
    assert calls(target) == 1


def test_a_lock_by_existence_that_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks (flock is not implemented): a killed process leaves its lock."""
    import fcntl

    def missing(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    target = tmp_path / "it"
    processes, _ = start(3, target)
    assert ended(processes) == [0] * 3
    assert calls(target) == 1
    target.unlink()
    (killed,), _ = start(1, target, seconds=60)
    wait_until(lambda: calls(target) == 2)
    killed.kill()
    killed.join()
    assert (tmp_path / ".it.lock").exists()
    assert counted(target) == "made"
    assert calls(target) == 3


def test_a_file_system_that_refuses_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert counted(tmp_path / "it") == "made"
    assert "cannot be locked here" in caplog.text


def test_the_first_rank_of_a_node_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, waiting = tmp_path / "it", Waiting(poll=0.02, head_start=600.0)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    threading.Timer(0.2, target.write_text, ("made by another one",)).start()
    began = time.monotonic()
    find = lambda: target.read_text() or None if target.exists() else None  # noqa: E731
    assert made_once(target, find, lambda heartbeat: "made here", waiting) == "made by another one"
    assert time.monotonic() - began < 120
    target.unlink()
    waiting = replace(waiting, head_start=1.0)
    assert made_once(target, find, lambda heartbeat: "made here", waiting) == "made here"


def test_an_error_of_the_maker_leaves_no_lock(tmp_path: Path) -> None:
    def make(heartbeat: WriterHeartbeat) -> str:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        made_once(tmp_path / "it", lambda: None, make, QUICK)
    assert not list(tmp_path.iterdir())


def test_what_is_there_needs_no_lock_and_no_right_to_write(tmp_path: Path) -> None:
    target = tmp_path / "it"
    target.write_text("made")
    lock = FileLock(tmp_path / ".it.lock")
    with lock:
        assert counted(target) == "made"
    assert not (tmp_path / "calls").exists()


def test_signs_of_life_name_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "writer"
    with WriterHeartbeat(path, 0.02):
        wait_until(path.exists)
        wait_until(lambda: bool(path.read_text()))
        first = json.loads(path.read_text())
        wait_until(lambda: '"beat": 4' in path.read_text())
    assert first["process"] == os.getpid() and not path.exists()

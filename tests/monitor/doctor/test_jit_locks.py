"""Locks of operators: held, left behind, and undecidable ones."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.monitor.doctor import jit_locks
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.jit_locks import extensions_directory, find_locks, lock_findings, remove_certain
from ds_trainer.monitor.doctor.startup_checks import check_machine
from ds_trainer.utils.compiler_caches import on_network

COMPILES = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("locked", flush=True)
time.sleep(100)
"""


def lock(directory: Path, minutes: float = 0.0) -> Path:
    """A lock below a level of versions, last touched some minutes ago."""
    path = directory / "py311_cpu" / "async_io" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    age(path, minutes)
    return path


def age(path: Path, minutes: float) -> None:
    when = time.time() - 60 * minutes
    os.utime(path, (when, when))


@pytest.fixture
def all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine no process is hidden, no file is on a network."""
    monkeypatch.setattr(jit_locks, "sees_whole_machine", lambda: True)
    monkeypatch.setattr(jit_locks, "on_network", lambda path: False)


def test_a_lock_is_stale_once_its_compiler_is_killed(tmp_path: Path, all_seen: None) -> None:
    """torch's own lock, held by a process and then left behind by it."""
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    command = [sys.executable, "-c", COMPILES, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as compiler:
        assert compiler.stdout is not None
        assert compiler.stdout.readline() == "locked\n"
        age(path, minutes=90)
        (active,) = find_locks(tmp_path)
        assert active.held_by == (compiler.pid,)
        assert not active.stale
        assert remove_certain(tmp_path) == ([], [])
        assert [finding.level for finding in lock_findings(tmp_path)] == [Level.OK]
        compiler.kill()
        compiler.wait()
    (stale,) = find_locks(tmp_path)
    assert stale.stale
    (finding,) = lock_findings(tmp_path)
    assert finding.level == Level.FAIL
    assert finding.remedy == f"rm {path}"
    removed, others = remove_certain(tmp_path)
    assert ([one.path for one in removed], others) == ([path], [])
    assert not path.exists()
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.OK]


def test_a_young_lock_may_belong_to_another_machine(tmp_path: Path, all_seen: None) -> None:
    path = lock(tmp_path)
    (finding,) = lock_findings(tmp_path)
    assert finding.level == Level.WARN
    assert remove_certain(tmp_path)[0] == []
    assert path.exists()


def test_a_lock_that_another_machine_may_hold_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_locks, "sees_whole_machine", lambda: True)
    monkeypatch.setattr(jit_locks, "on_network", lambda path: True)
    path = lock(tmp_path, minutes=5)
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.WARN]
    age(path, minutes=300)  # nothing takes so long to compile, but a person is to decide
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.FAIL]
    assert remove_certain(tmp_path)[0] == []
    assert path.exists()


def test_recent_writes_show_that_a_compiler_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_locks, "on_network", lambda path: True)
    path = lock(tmp_path, minutes=300)
    (path.parent / "half.o").touch()
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.WARN]


def test_a_lock_from_before_the_last_boot_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_locks, "sees_whole_machine", lambda: False)
    monkeypatch.setattr(jit_locks, "on_network", lambda path: False)
    path = lock(tmp_path, minutes=10)
    monkeypatch.setattr(psutil, "boot_time", lambda: time.time() - 3600)
    assert not find_locks(tmp_path)[0].certain
    monkeypatch.setattr(psutil, "boot_time", lambda: time.time() - 60)
    assert [one.path for one in remove_certain(tmp_path)[0]] == [path]


def test_startup_removes_a_stale_lock_and_logs_it(
    tmp_path: Path, all_seen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("ds_trainer"), "propagate", True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    path = lock(tmp_path / "extensions", minutes=5)
    check_machine(TrainingArguments(str(tmp_path), use_cpu=True), 0)
    assert not path.exists()
    assert f"Removed {path}" in caplog.text


def test_network_file_systems_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    mounts = [("/", "ext4"), (f"{tmp_path}/a b", "ext4"), (f"{tmp_path}/a b", "nfs4"), (str(tmp_path), "tmpfs")]
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found if all else [])
    assert on_network(tmp_path / "a b" / "lock")  # the last mount at a place hides the others
    assert not on_network(tmp_path / "lock")
    found.clear()
    assert on_network(tmp_path / "lock")


def test_the_file_system_of_this_machine() -> None:
    assert not on_network(Path("/proc/self/lock"))


def test_the_directory_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    assert extensions_directory({"TORCH_EXTENSIONS_DIR": "/a"}) == Path("/a")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for cache in (None, str(tmp_path)):
        if cache is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert extensions_directory().resolve() == Path(get_default_build_root())

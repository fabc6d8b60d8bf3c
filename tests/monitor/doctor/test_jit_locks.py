"""Locks of operators: held, left behind, and such that nobody can say."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.monitor.doctor import jit_locks
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.jit_locks import extensions_directory, find_locks, lock_findings, remove_certain
from ds_trainer.monitor.doctor.start import check_machine

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


def test_a_compiler_is_waited_for_until_it_is_killed(tmp_path: Path, all_seen: None) -> None:
    """torch's own lock, held by a process and then left behind by it."""
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    command = [sys.executable, "-c", COMPILES, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as compiler:
        assert compiler.stdout is not None
        assert compiler.stdout.readline() == "locked\n"
        age(path, minutes=90)
        (held,) = find_locks(tmp_path)
        assert held.held_by == (compiler.pid,)
        assert not held.stale
        assert remove_certain(tmp_path) == ([], [])
        assert [finding.level for finding in lock_findings(tmp_path)] == [Level.OK]
        compiler.kill()
        compiler.wait()
    (left,) = find_locks(tmp_path)
    assert left.stale
    (finding,) = lock_findings(tmp_path)
    assert finding.level == Level.FAIL
    assert finding.remedy == f"rm {path}"
    removed, others = remove_certain(tmp_path)
    assert ([one.path for one in removed], others) == ([path], [])
    assert not path.exists()
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.OK]


def test_a_young_lock_may_be_another_machines(tmp_path: Path, all_seen: None) -> None:
    path = lock(tmp_path)
    (finding,) = lock_findings(tmp_path)
    assert finding.level == Level.WARN
    assert remove_certain(tmp_path)[0] == []
    assert path.exists()


def test_what_other_machines_may_hold_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_locks, "sees_whole_machine", lambda: True)
    monkeypatch.setattr(jit_locks, "on_network", lambda path: True)
    path = lock(tmp_path, minutes=5)
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.WARN]
    age(path, minutes=300)  # nothing takes so long to compile, but a person is to decide
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.FAIL]
    assert remove_certain(tmp_path)[0] == []
    assert path.exists()


def test_work_in_the_directory_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_locks, "on_network", lambda path: True)
    path = lock(tmp_path, minutes=300)
    (path.parent / "half.o").touch()
    assert [finding.level for finding in lock_findings(tmp_path)] == [Level.WARN]


def test_a_lock_from_before_the_start_of_the_machine_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_locks, "sees_whole_machine", lambda: False)
    monkeypatch.setattr(jit_locks, "on_network", lambda path: False)
    path = lock(tmp_path, minutes=10)
    monkeypatch.setattr(jit_locks, "started_at", lambda: time.time() - 3600)
    assert not find_locks(tmp_path)[0].certain
    monkeypatch.setattr(jit_locks, "started_at", lambda: time.time() - 60)
    assert [one.path for one in remove_certain(tmp_path)[0]] == [path]


def test_a_start_removes_a_stale_lock_and_says_so(
    tmp_path: Path, all_seen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("ds_trainer"), "propagate", True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    path = lock(tmp_path / "extensions", minutes=5)
    check_machine(TrainingArguments(str(tmp_path), use_cpu=True), 0)
    assert not path.exists()
    assert f"Removed {path}" in caplog.text


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nserver:/home {tmp_path}/a\\040b nfs4 rw 0 0\nx {tmp_path} tmpfs rw 0 0\n"
    )
    (tmp_path / "a b").mkdir()
    assert jit_locks.on_network(tmp_path / "a b" / "lock", mounts)
    assert not jit_locks.on_network(tmp_path / "lock", mounts)
    assert jit_locks.on_network(tmp_path / "lock", tmp_path / "none")


def test_the_directory_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    assert extensions_directory({"TORCH_EXTENSIONS_DIR": "/a"}) == Path("/a")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for cache in (None, str(tmp_path)):
        if cache is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert extensions_directory().resolve() == Path(get_default_build_root())

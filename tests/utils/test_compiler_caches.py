"""Caches of Triton and inductor: on this machine, one directory a user, and where the user wants them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from ds_trainer.monitor.doctor.examination import kernel_findings
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.parallel import kernel_trial
from ds_trainer.utils import compiler_caches
from ds_trainer.utils.compiler_caches import local_caches, on_network
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.torch_group import prepare_process

TRITON, INDUCTOR = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk of this machine, for temporary files; the home directory beside it is a network file system."""
    for name in ("home", "disk"):
        (tmp_path / name).mkdir()
    mounts = [("/", "ext4"), (str(tmp_path / "home"), "nfs4")]
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (TRITON, INDUCTOR, "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "disk"


def test_a_shared_home_has_no_cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = disk / f"ds_trainer-{os.getuid()}"
    assert local_caches({}) == {TRITON: str(own / "triton")}
    assert own.stat().st_mode & 0o777 == 0o700
    assert local_caches({}) == {TRITON: str(own / "triton")}  # of the next rank, too
    monkeypatch.setenv(TRITON, "")
    monkeypatch.setenv(INDUCTOR, "/somewhere")
    prepare_process(resolve_ranks({}), "cpu")
    assert os.environ[TRITON] == str(own / "triton")
    assert os.environ[INDUCTOR] == "/somewhere"


def test_a_local_home_is_left_alone(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(disk))
    assert local_caches({}) == {}
    assert list(disk.iterdir()) == []


def test_nothing_is_set_where_no_file_system_is_known(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(all: bool) -> object:
        raise FileNotFoundError("/proc/self/mounts")

    monkeypatch.setattr(psutil, "disk_partitions", hidden)
    assert local_caches({}) == {}


def test_the_values_of_the_user_stay(disk: Path) -> None:
    shared = str(disk.parent / "home" / "cache")
    assert local_caches({TRITON: shared}) == {}
    assert local_caches({"TRITON_HOME": shared}) == {}


def test_temporary_files_on_a_shared_disk_move_inductors_too(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(disk.parent / "home"))
    found = local_caches({})
    assert set(found) == {TRITON, INDUCTOR}
    assert all(not on_network(Path(path)) for path in found.values())


@pytest.mark.parametrize("kind", ["writable", "link", "file"])
def test_what_others_could_write_is_not_used(kind: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the machine may have made the directory: its files would be run."""
    own = disk / f"ds_trainer-{os.getuid()}"
    if kind == "writable":
        own.mkdir()
        own.chmod(0o777)
    elif kind == "link":
        (disk / "other").mkdir()
        own.symlink_to(disk / "other")
    else:
        own.touch()
    assert all(not path.startswith(str(own)) for path in local_caches({}).values())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_not_used(disk: Path) -> None:
    own = disk / f"ds_trainer-{os.getuid()}"
    own.mkdir(mode=0o700)
    os.chown(own, 12345, -1)
    assert all(not path.startswith(str(own)) for path in local_caches({}).values())


def test_a_disk_from_which_nothing_can_be_run_is_not_used(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.statvfs

    def statvfs(path: str) -> object:
        state = original(path)
        flags = state.f_flag | (os.ST_NOEXEC if path == str(disk) else 0)
        return SimpleNamespace(f_flag=flags, f_bavail=state.f_bavail, f_frsize=state.f_frsize)

    monkeypatch.setattr(compiler_caches.os, "statvfs", statvfs)
    assert all(not path.startswith(str(disk)) for path in local_caches({}).values())


def test_the_doctor_says_where_the_caches_are_and_what_does_not_compile(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    triton, inductor = kernel_findings(cpu, {INDUCTOR: str(disk)})
    assert triton.level == Level.WARN and "network file system" in triton.message and TRITON in triton.remedy
    assert inductor.level == Level.OK and str(disk) in inductor.message
    monkeypatch.setattr("ds_trainer.monitor.doctor.examination.suits", lambda device: True)
    monkeypatch.setattr("ds_trainer.parallel.kernel_trial.suits", lambda device: True)
    monkeypatch.setattr(kernel_trial, "_difference", lambda *_: 1.0)
    *_, kernels = kernel_findings(cpu, {})
    assert kernels.level == Level.WARN and "differ from torch's operators by 1" in kernels.message

"""Disks, shared memory, limits, memory and cores, each with a machine that is fine and one that is not."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.machine import (
    core_findings,
    disk_findings,
    left_buffers,
    limit_findings,
    shared_memory_findings,
)
from ds_trainer.utils import open_files

GB = 10**9


def disk(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 10**6) -> None:
    state = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=10 * GB, f_files=10**6, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: state)


@pytest.mark.parametrize(
    ("free", "inodes", "level", "message"),
    [
        (4 * GB, 10**6, Level.OK, "4 GB of 10 GB free"),
        (GB // 4, 10**6, Level.WARN, "250 MB of 10 GB free"),
        (4096, 10**6, Level.FAIL, "4.1 kB of 10 GB free"),
        (4 * GB, 12, Level.WARN, "but only 12 inodes"),
    ],
)
def test_free_disk_space_is_checked(
    free: int, inodes: int, level: Level, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, free, inodes)
    (finding,) = disk_findings({"output_dir": tmp_path / "not" / "there"}, {})
    assert finding.level == level
    assert message in finding.message
    assert (finding.remedy == "") == (level == Level.OK)


def test_a_checkpoint_that_does_not_fit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 4 * GB)
    (finding,) = disk_findings({"output_dir": tmp_path}, {"output_dir": 6 * GB})
    assert finding.level == Level.WARN
    assert "At least 6 GB are needed" in finding.remedy


def test_little_shared_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, GB)
    assert [finding.level for finding in shared_memory_findings(tmp_path)] == [Level.OK]
    disk(monkeypatch, 60 * 2**20)
    (finding,) = shared_memory_findings(tmp_path)
    assert finding.level == Level.WARN
    assert "--shm-size" in finding.remedy


def test_buffers_of_dead_runs_are_distinguished_from_those_in_use(tmp_path: Path) -> None:
    dead, used = (tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_29500_{rank}" for rank in range(2))
    for path in (dead, used):
        path.write_bytes(b"x" * 4096)
    with used.open("r+b") as stream, mmap.mmap(stream.fileno(), 4096):
        assert left_buffers(tmp_path) == [dead]
    assert sorted(left_buffers(tmp_path)) == [dead, used]
    finding = shared_memory_findings(tmp_path)[-1]
    assert "2 buffers of DeepSpeed runs that have ended, 8.19 kB" in finding.message


def test_resource_limits_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: 65536, resource.RLIMIT_NPROC: 65536, resource.RLIMIT_STACK: 2**23}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, 65536), -1))
    assert {finding.level for finding in limit_findings(fast_network=False)} == {Level.OK}
    bad = [finding.name for finding in limit_findings(fast_network=True) if finding.level != Level.OK]
    assert bad == ["limit of locked memory"]
    limits[resource.RLIMIT_NOFILE] = 256
    worst = next(finding for finding in limit_findings(fast_network=False) if finding.level == Level.FAIL)
    assert (worst.name, worst.message) == ("limit of open files", "256, but rank 0 of 1 may come to 1026")
    assert "ulimit -n" in worst.remedy


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "level", "remedy"),
    [
        (8, 4, "2", Level.OK, ""),
        (8, 4, None, Level.WARN, "export OMP_NUM_THREADS=2"),
        (8, 4, "8", Level.WARN, "more threads than cores"),
        (1, 4, "1", Level.WARN, "--cpus-per-task"),
        (8, 1, None, Level.OK, ""),
    ],
)
def test_threads_are_compared_with_cores(
    cores: int, ranks: int, threads: str | None, level: Level, remedy: str
) -> None:
    (finding,) = core_findings([frozenset(range(cores))] * ranks, threads)
    assert finding.level == level
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("soft", "rank", "world", "level", "message"),
    [
        (65536, 0, 4096, Level.OK, "65536"),
        (8192, 0, 4096, Level.WARN, "8192, but rank 0 of 4096 may come to 9216"),
        (8192, 1, 4096, Level.OK, "8192"),
        (4096, 0, 4096, Level.FAIL, "4096, but rank 0 holds 8192 connections of 4096 ranks to the rendezvous store"),
    ],
)
def test_open_files_are_compared_with_what_rank_0_needs(
    soft: int, rank: int, world: int, level: Level, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    found = next(one for one in limit_findings(False, rank, world) if one.name == "limit of open files")
    assert (found.level, found.message) == (level, message)


def test_the_agent_of_torchrun_keeps_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the store instead of rank 0, and its limit is not raised."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(open_files, "_inherited", 1024)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    found = next(one for one in limit_findings(False, 0, 1024) if one.name == "limit of open files")
    assert found.level == Level.FAIL
    assert found.message.startswith("1024, but torchrun's agent holds 2048 connections of 1024 ranks")
    assert limit_findings(False, 1, 1024)[0].level == Level.OK


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard));"
        "from ds_trainer.utils.open_files import raise_open_file_limit as up; up(); up();"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

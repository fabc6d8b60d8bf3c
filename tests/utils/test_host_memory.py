"""Free host memory respects the cgroup limit of the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ds_trainer.checkpoint.background.snapshot import fits_in_memory
from ds_trainer.engine.whole_weights import free_memory
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.machine import memory_finding
from ds_trainer.utils import host_memory
from ds_trainer.utils.host_memory import cgroup_memory, free_host_memory, total_host_memory
from tests.support.memory_limit import memory_limit

GIB = 2**30


def job(tmp_path: Path, version: int, used: int = GIB, reclaimable: int = 0) -> tuple[Path, Path]:
    """A job of 8 GiB in a partition of 64: the cgroup directory, and the file that names the cgroup of this process."""
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n" if version == 2 else "9:cpu:/\n4:memory:/slurm/job_7/step_0\n")
    root = tmp_path / "cgroup" / ("" if version == 2 else "memory")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    statistic = "inactive_file" if version == 2 else "total_inactive_file"
    for directory, limit in (("slurm/job_7/step_0", "max"), ("slurm/job_7", str(8 * GIB)), ("slurm", str(64 * GIB))):
        (root / directory).mkdir(parents=True, exist_ok=True)
        (root / directory / names[0]).write_text(f"{limit}\n")
        (root / directory / names[1]).write_text(f"{used}\n")
        (root / directory / "memory.stat").write_text(f"anon 5\n{statistic} {reclaimable}\n")
    return tmp_path / "cgroup", own


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GiB free of 128."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB, total=128 * GIB))


@pytest.mark.parametrize("version", [1, 2])
def test_the_lowest_limit_of_a_job_applies(version: int, tmp_path: Path) -> None:
    cgroups, own = job(tmp_path, version)
    assert cgroup_memory(cgroups, own) == (8 * GIB, GIB)
    assert free_host_memory(cgroups, own) == 7 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_page_cache_does_not_count_as_used(version: int, tmp_path: Path) -> None:
    """It fills up with every checkpoint that is written, and the kernel drops it first."""
    cgroups, own = job(tmp_path, version, used=8 * GIB, reclaimable=6 * GIB)
    assert free_host_memory(cgroups, own) == 6 * GIB


def test_without_a_limit_the_memory_of_the_machine_applies(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path, tmp_path / "none") is None
    assert free_host_memory(tmp_path, tmp_path / "none") == 100 * GIB
    assert total_host_memory(tmp_path, tmp_path / "none") == 128 * GIB


def test_all_users_apply_the_limit_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fits into the machine but not into the job would cause an out-of-memory kill."""
    import torch

    cgroups, own = job(tmp_path, 2)
    assert fits_in_memory(20 * GIB), "without a limit"

    monkeypatch.setattr(host_memory.free_host_memory, "__defaults__", (cgroups, own))
    monkeypatch.setattr(host_memory.cgroup_memory, "__defaults__", (cgroups, own))
    assert not fits_in_memory(20 * GIB)
    assert fits_in_memory(4 * GIB)
    assert free_memory(torch.device("cpu")) == 7 * GIB
    finding = memory_finding(local_ranks=4)
    assert finding.level == Level.WARN
    assert "107 GB of 137 GB available; this job may use 8.59 GB and uses 1.07 GB: 1.88 GB for each" in finding.message


def test_only_one_function_queries_free_memory() -> None:
    package = Path(host_memory.__file__).parents[1]
    found = [path.name for path in package.rglob("*.py") if ".available" in path.read_text(encoding="utf-8")]
    assert sorted(found) == ["host_memory.py", "machine.py"], "and the doctor prints both"


def cgroup(directory: Path, limits: dict[str, int | str], used: int, version: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in limits.items():
        (directory / name).write_text(f"{value}\n")
    (directory / ("memory.current" if version == 2 else "memory.usage_in_bytes")).write_text(f"{used}\n")


@pytest.mark.parametrize(
    ("outer", "inner", "total", "free"),
    [
        (
            {"memory.max": 64 * GIB},
            {"memory.max": 8 * GIB},
            8,
            4,
        ),  # the outer one is nearly full with the jobs of others
        ({"memory.max": 8 * GIB}, {"memory.max": 64 * GIB}, 8, -52),
        ({"memory.max": "max"}, {"memory.max": "max"}, 128, 100),
        ({"memory.max": "max"}, {"memory.high": 16 * GIB, "memory.max": 32 * GIB}, 16, 15),
        ({"memory.high": 90 * GIB}, {"memory.high": "max", "memory.max": "max"}, 90, 30),
        ({"memory.high": "max", "memory.max": 70 * GIB}, {"memory.max": 4 * GIB}, 4, 3),
        ({"memory.max": 0}, {"memory.max": "max"}, 0, -60),
    ],
)
def test_nested_limits(outer: Any, inner: Any, total: int, free: int, tmp_path: Path) -> None:
    """The smallest limit is what a job may use; what is free is decided where least is free."""
    own = tmp_path / "own"
    own.write_text("0::/slurm/job\n")
    cgroup(tmp_path / "slurm", outer, 60 * GIB, 2)
    cgroup(tmp_path / "slurm" / "job", inner, GIB, 2)
    assert total_host_memory(tmp_path, own) == total * GIB
    assert free_host_memory(tmp_path, own) == max(0, free) * GIB


def test_version_1_without_a_limit_has_none(tmp_path: Path) -> None:
    """It gives the largest number of pages instead of a word."""
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/1\n0::/\n")
    cgroup(tmp_path / "memory" / "docker" / "1", {"memory.limit_in_bytes": 9223372036854771712}, GIB, 1)
    assert cgroup_memory(tmp_path, own) is None and total_host_memory(tmp_path, own) == 128 * GIB


def test_version_1_says_what_limits_a_container_from_outside(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/\n")
    cgroup(tmp_path / "memory", {"memory.limit_in_bytes": 9223372036854771712}, GIB, 1)
    (tmp_path / "memory" / "memory.stat").write_text(f"cache 5\nhierarchical_memory_limit {6 * GIB}\n")
    assert cgroup_memory(tmp_path, own) == (6 * GIB, GIB)


PLANNED = """
from ds_trainer import TrainingArguments
from ds_trainer.training.job_devices import JobDevices

print(JobDevices.of_job(TrainingArguments("out", use_cpu=True), 1).cluster.board.memory)
"""


@pytest.mark.extended
def test_plan_and_doctor_in_a_real_cgroup(tmp_path: Path) -> None:
    """A limit of the cgroup above that of the process, which has none itself."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    commands = (["-c", PLANNED], ["-m", "ds_trainer", "doctor"])
    with memory_limit(3 * 10**9) as enter:
        planned, examined = (
            subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env=environment,
                preexec_fn=enter,
                timeout=300,
                check=False,
            )
            for command in commands
        )
    assert float(planned.stdout) == pytest.approx(3.0, rel=0.01), planned.stderr
    assert "this job may use 3 GB and uses" in examined.stdout, examined.stdout + examined.stderr

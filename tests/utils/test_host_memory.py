"""Free host memory respects the cgroup limit of the job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ds_trainer.checkpoint.background.snapshot import fits_in_memory
from ds_trainer.engine.whole_weights import free_memory
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.machine import memory_finding
from ds_trainer.utils import host_memory
from ds_trainer.utils.host_memory import cgroup_memory, free_host_memory, total_host_memory

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


def test_a_full_job_has_no_free_memory(tmp_path: Path) -> None:
    assert free_host_memory(*job(tmp_path, 2, used=9 * GIB)) == 0


def test_without_a_limit_the_memory_of_the_machine_applies(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path, tmp_path / "none") is None
    assert free_host_memory(tmp_path, tmp_path / "none") == 100 * GIB


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


def test_the_total_is_the_limit_of_the_job(tmp_path: Path) -> None:
    assert total_host_memory(*job(tmp_path, 2, used=7 * GIB)) == 8 * GIB
    assert total_host_memory(tmp_path / "no cgroups", tmp_path / "nothing") == 128 * GIB

"""The cluster that launchers are tried on: that it is one, and that nothing of it outlives the tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.machines import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.slurm]


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(encoding="ascii")


def test_nodes_are_machines(cluster: Cluster, tmp_path: Path) -> None:
    names = cluster.hub("srun", "-N2", "--ntasks-per-node=2", "hostname").split()
    assert sorted(names) == ["node1", "node1", "node2", "node2"]
    assert cluster.run("node2", "hostname").stdout == "node2\n"
    assert cluster.run("node1", "ssh", "node2", "hostname").stdout == "node2\n"
    # Own processes, own shared memory, one file system.
    assert cluster.run("node1", "bash", "-c", "cat /proc/[0-9]*/comm").stdout.split().count("slurmd") == 1
    cluster.run("node1", "touch", "/dev/shm/of_node1", str(tmp_path / "shared"))
    assert cluster.run("node2", "ls", "/dev/shm").stdout == ""
    assert not Path("/dev/shm/of_node1").exists() and (tmp_path / "shared").exists()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_is_left_behind(cluster: Cluster, tmp_path: Path, end: str) -> None:
    """Also where what holds the cluster is killed. It runs beside the other one: they do not know each other."""
    before = mounts(), sorted(os.listdir("/run")), sorted(psutil.net_if_addrs())
    other = Cluster(tmp_path, nodes=1)
    job = other.submit("--wrap", "sleep 600", cwd=tmp_path)
    other.wait_until(lambda: other.job(job)["JobState"] == "RUNNING", 20)
    processes: list[psutil.Process] = []

    def complete() -> bool:
        """Some of the processes that start a job end at once."""
        processes[:] = psutil.Process(other.process).children(recursive=True)
        names = {process.info["name"] for process in psutil.process_iter(["name"]) if process in processes}
        return {"slurmctld", "slurmd", "munged", "sshd", "sleep"} <= names

    other.wait_until(complete, 20)
    assert cluster.hub("squeue", "-h", "-j", str(job), check=False) == ""
    if end == "kill":
        os.kill(other.process, signal.SIGKILL)
    other.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert before == (mounts(), sorted(os.listdir("/run")), sorted(psutil.net_if_addrs()))


def test_a_crashed_node_comes_back(cluster: Cluster) -> None:
    knock = ["timeout", "2", "bash", "-c", "</dev/tcp/node2/22"]
    cluster.run("hub", *knock)
    cluster.crash("node2")
    assert cluster.run("hub", *knock, check=False).returncode != 0
    cluster.boot("node2")

    def ready() -> bool:
        return cluster.hub("sinfo", "-h", "-N", "-n", "node2", "-p", "main", "-o", "%t") == "idle"

    cluster.wait_until(ready, 30, lambda: cluster.hub("sinfo", "-R"))
    started = time.monotonic()
    assert cluster.hub("srun", "-w", "node2", "hostname") == "node2"
    assert time.monotonic() - started < 60

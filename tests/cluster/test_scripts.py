"""The batch scripts of launch/ on two nodes: the same losses as one process on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.jobs import RECIPE, ROOT, STEPS, environment, losses, sbatch_arguments, small_arguments, users_folder
from tests.cluster.machines import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.slurm]

SCRIPTS = ("one_node", "nodes_srun", "nodes_torchrun")


@dataclass
class Job:
    number: int
    output: Path
    log: Path


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The same training by every script, and as ``python``, a process on this machine. All wait for their starts
    together."""
    folder = users_folder(tmp_path_factory.mktemp("scripts"))
    started = {}
    for script in SCRIPTS:
        one = script == "one_node"
        log, output = folder / f"{script}.log", folder / script
        gpus = f"--gpus-per-node={2 if one else 1}"
        argv = [*sbatch_arguments(log, 1, gpus), f"launch/{script}.sbatch", RECIPE, *small_arguments(output, 2)]
        started[script] = Job(cluster.submit(*argv, cwd=folder, env=environment()), output, log)
    output, log = folder / "python", folder / "python.log"
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, "-m", "ds_trainer", "train", RECIPE, *small_arguments(output, 1)],
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=os.environ | environment(),
            check=False,
            timeout=180,
        )
    return {**started, "python": Job(0, output, log)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_are_those_of_one_machine(cluster: Cluster, jobs: dict[str, Job], script: str) -> None:
    job = jobs[script]
    job_state = cluster.wait_for(job.number, 180, job.log)
    text = job.log.read_text(encoding="utf-8")
    assert (job_state["JobState"], job_state["Restarts"]) == ("COMPLETED", "0"), text
    assert job_state["NumNodes"] == ("1" if script == "one_node" else "2")
    assert "the ranks ended with 0, srun with 0" in text
    assert (job.output / "results.json").exists()
    wanted = losses(jobs["python"].output)
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    assert losses(job.output) == pytest.approx(wanted, rel=1e-5)
    assert not (job.log.parent / f"slurm-{job.number}.state").exists()

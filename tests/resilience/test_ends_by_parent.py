"""A rank of two ends in any way, under any parent: the output names that rank, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.utils import outcomes
from ds_trainer.utils.exit_codes import DONE, HUNG
from ds_trainer.utils.ranks import free_port
from tests.cluster.jobs import environment, sbatch_arguments, users_folder
from tests.cluster.machines import Cluster, why_not
from tests.resilience.ends import ENDS, FAILING
from tests.support.memory_limit import memory_limit

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LIMIT = 3 * 10**9
BROKEN = "tests.resilience.ends.Breaks: broken"
COMMANDS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port"],
    "launch": ["ds-trainer", "launch", "--nproc-per-node", "2", "--master-port"],
}
# What each parent says itself of the first rank that has failed.
SAID = {
    "deepspeed": r"--local_rank=(\d+)'\] exits with return code",
    "torchrun": r"Root Cause.*?rank\s+: (\d+)",
    "launch": r"ds-trainer launch: rank (\d+) on \S+ (?:was killed|ended)",
    "slurm": r"\[slurm\] [^\n]*?rank (\d+)(?:\)| on)",
}
SURVIVORS = r"rank (\d+) (?:failed with|on \S+ is gone)|Slow: rank (\d+) \("
# By default in the extended run; the others run with -m matrix.
OFTEN = [("launch", end) for end in ("error", "os._exit", "sys.exit(0)", "SIGKILL", "memory of the job", "hang in C")]
OFTEN += [("torchrun", "error in the backward pass"), ("torchrun", "SIGKILL"), ("deepspeed", "SIGSEGV")]
OFTEN += [("slurm", end) for end in ("full disk", "sys.exit(0)", "SIGKILL")]
# The group of SLURM has no limit here, and a rank of it that stops, stops the shell that would write its code down.
APART = [("slurm", "memory of the job"), ("slurm", "SIGSTOP")]


@contextmanager
def no_limit() -> Iterator[None]:
    yield None


def processes_of(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, of which each has one rank."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no cluster inside this machine: {reason}")
    machines = Cluster(tmp_path_factory.mktemp("cluster"), 2)
    yield machines
    machines.close()


def under_slurm(cluster: Cluster, script: Path, end: str) -> tuple[int, str]:
    """Exit code and output of a job that is not started again."""
    log = script.with_name("log")
    command = [*sbatch_arguments(log, 1, "--gpus-per-node=1"), "launch/nodes_srun.sbatch", str(script)]
    folder = users_folder(script.parent)
    job = cluster.submit(*command, cwd=folder, env=environment(TEST_END=end, MAX_RESTARTS="0"))
    code, _, number = cluster.wait_for(job, 400, log)["ExitCode"].partition(":")
    return int(code) or int(number), log.read_text(encoding="utf-8", errors="replace")


def under_launcher(parent: str, script: Path, end: str) -> tuple[int, str]:
    """Exit code and output of a job on this machine."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    own = {"TEST_END": end, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{kept['PATH']}"}
    with memory_limit(LIMIT) if end == "memory of the job" else no_limit() as enter:
        job = subprocess.Popen(
            [*COMMANDS[parent], str(free_port()), str(script)],
            env={**kept, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=enter,
        )
        try:
            output, _ = job.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
    return job.returncode, output


@pytest.mark.parametrize(
    ("parent", "end"),
    [
        pytest.param(parent, end, marks=() if (parent, end) in OFTEN else pytest.mark.matrix, id=f"{parent}, {end}")
        for parent in SAID
        for end in ENDS
        if (parent, end) not in APART
    ],
)
def test_the_rank_that_ended_is_named(parent: str, end: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"from tests.resilience.ends import main\nmain({str(tmp_path / 'out')!r})\n")
    if parent == "slurm":
        code, output = under_slurm(request.getfixturevalue("cluster"), script, end)
    else:
        code, output = under_launcher(parent, script, end)
    assert processes_of(str(script)) == []
    wanted = ENDS[end]
    said = wanted.said.format(host="node2" if parent == "slurm" else outcomes.host_name())
    of_survivors = ["".join(found) for found in re.findall(SURVIVORS, output)]
    assert set(of_survivors) <= {str(FAILING)}, output
    if wanted.code == DONE:
        assert code == DONE and said in output, output
        return
    assert code == wanted.code if parent in ("launch", "slurm") else code != DONE, output
    if end == "SIGTERM":
        assert said in output and list_checkpoints(tmp_path / "out"), output
        return
    if end == "full disk":  # an error of all ranks that names the one: any of them may end first
        assert f"rank {FAILING} failed to write its files: OSError: [Errno 27]" in output, output
        return
    of_parent = re.findall(SAID[parent], output, re.DOTALL)[:1]
    # deepspeed says which process ended first, and a survivor may be faster; torchrun knows of no end with code 0.
    if parent == "deepspeed" or wanted.code == HUNG or (parent, end) == ("torchrun", "os._exit(0)"):
        of_parent = [*of_survivors, *of_parent][:1]
    assert of_parent == [str(FAILING)], output
    if parent == "launch":  # the others may take their time
        assert said in output, output
        if end == "error":
            assert output.splitlines()[-1] == f"ds-trainer launch: rank {FAILING} failed: {BROKEN}"
    if parent == "torchrun" and end == "error":
        assert BROKEN in output.partition("Root Cause")[2], "torchrun's own summary has the error"

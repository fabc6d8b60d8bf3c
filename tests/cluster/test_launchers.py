"""``ds-trainer launch`` over two machines with every launcher: ranks connect, exit codes are right, all ranks end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.jobs import environment
from tests.cluster.machines import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.slurm]

# Prints its rank, connects to the others, and ends as requested.
PROGRAM = """\
import os, signal, sys, time
rank = os.environ["RANK"]
if sys.argv[1] not in ("killed", "sleeps"):
    from torch import distributed, ones
    distributed.init_process_group("gloo")
    total = ones(1)
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    open(f"said{rank}", "w").write(f"{os.uname().nodename} {total.item()} {os.environ.get('SAID')} {sys.argv[1:]}")
    sys.exit(75 if sys.argv[1] == "requeue" else 0)
if sys.argv[1:] == ["killed"] and rank == "3":
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"asleep{rank}", "w").close()
time.sleep(600)
"""
TRICKY = 'a,b "c" $HOME `x` 100%h \\'
BY_SSH = ("pdsh", "openmpi")
IN_SLURM = ("srun", "slurm", "torchrun")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    return tmp_path


def argv_of(launcher: str, *argv: str) -> list[str]:
    """``ds-trainer launch`` with 2 x 2 ranks, as it is typed on node1 or in an allocation."""
    launch = [sys.executable, "-m", "ds_trainer", "launch", "--launcher", launcher]
    if launcher in BY_SSH:
        return [*launch, "--hostfile", "hosts", *argv]
    allocation = ["salloc", "-Q", "-N2", "--ntasks-per-node=2", "--mem=1000"]
    return [*allocation, *launch, "--nproc-per-node", "2", *argv]


def run(
    cluster: Cluster, folder: Path, launcher: str, *argv: str, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    machine = "node1" if launcher in BY_SSH else "hub"
    variables = environment(DS_ACCELERATOR="cpu", SAID=TRICKY)
    return cluster.run(machine, *argv_of(launcher, *argv), cwd=folder, env=variables, check=False, timeout=timeout)


def ranks_left(cluster: Cluster, program: Path) -> list[str]:
    """Processes of the nodes that run ``program``, or a launcher of it."""
    code = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; echo; done 2>/dev/null'
    lines = [line for node in cluster.nodes for line in cluster.run(node, "bash", "-c", code).stdout.splitlines()]
    return [line for line in lines if str(program) in line]


@pytest.mark.cases(1)
@pytest.mark.parametrize("launcher", [*BY_SSH, *IN_SLURM])
def test_four_ranks_connect_and_get_their_arguments(cluster: Cluster, folder: Path, launcher: str) -> None:
    word = "requeue" if launcher in ("pdsh", "slurm") else "it's"
    completed = run(cluster, folder, launcher, "--env", "SAID", "program.py", word, "$HOME %n;")
    assert completed.returncode == (75 if word == "requeue" else 0), completed.stdout + completed.stderr
    for rank in range(4):
        wanted = f"""node{1 + rank // 2} 4.0 {TRICKY} {[word, "$HOME %n;"]}"""
        assert (folder / f"said{rank}").read_text() == wanted
    assert not (folder / ".ds_trainer_launch").exists()


# Instead: the same test with pdsh; exit codes of ranks under srun: tests/cluster/test_ends.py;
# test_remote_ranks_end_when_the_launcher_is_killed[pdsh]; exit codes of ranks: tests/cluster/test_ends.py
@pytest.mark.matrix
@pytest.mark.parametrize("launcher", ["pdsh", "srun"])
def test_a_killed_rank_ends_the_job_with_its_exit_code(cluster: Cluster, folder: Path, launcher: str) -> None:
    program = folder / "program.py"
    completed = run(cluster, folder, launcher, str(program), "killed")
    assert completed.returncode == 137, completed.stdout + completed.stderr
    assert "rank 3 on node2 was killed by SIGKILL" in completed.stderr
    assert ranks_left(cluster, program) == []


# Instead: tests/launching/test_commands.py, and the same command started by ds-trainer in this file
@pytest.mark.matrix
def test_the_command_for_many_machines_can_be_pasted(cluster: Cluster, folder: Path) -> None:
    printed = run(cluster, folder, "pdsh", "--dry-run", "--env", "SAID", "program.py", "x y")
    assert printed.returncode == 0, printed.stderr
    pasted = environment(DS_ACCELERATOR="cpu")
    cluster.run("node1", "bash", "-c", printed.stdout, cwd=folder, env=pasted, timeout=300)
    assert (folder / "said3").read_text() == f"node2 4.0 {TRICKY} ['x y']"


def test_machines_started_by_hand(cluster: Cluster, folder: Path) -> None:
    """``deepspeed --no_ssh`` on each of them."""
    launch = [sys.executable, "-m", "ds_trainer", "launch", "--hostfile", "hosts", "--master-addr", "node1"]
    variables = {"PATH": "/usr/bin:/bin", **environment(DS_ACCELERATOR="cpu")}
    started = [
        subprocess.Popen(
            cluster.command(node, [*launch, "--node-rank", str(number), "program.py", "x"], folder),
            env=variables,
            stdin=subprocess.DEVNULL,
        )
        for number, node in enumerate(cluster.nodes)
    ]
    assert [one.wait(timeout=300) for one in started] == [0, 0]
    assert (folder / "said3").read_text() == "node2 4.0 None ['x']"


# What a script finds out by itself, without `ds-trainer launch` around it.
ALONE = """\
import os, sys
from torch import distributed, ones
from ds_trainer.engine.process_group import start_process_group, stop_process_group
info = start_process_group("cpu")
total = ones(1)
distributed.all_reduce(total)
stop_process_group()
where = f"{os.uname().nodename} {info.local_rank} {total.item()} {info.launcher}"
open(f"said{info.rank}", "w").write(where)
"""
HYDRA = ["mpiexec.hydra", "-ppn", "2", "-n", "4"]
ORTERUN = ["orterun", "--allow-run-as-root", "--mca", "plm_rsh_agent", "ssh", "--hostfile", "hosts", "-n", "4"]
SALLOC = ["salloc", "-Q", "-N2", "--ntasks-per-node=2", "--mem=1000"]
BY_HAND = {
    "hydra, ssh": ("mpich", [*HYDRA, "-launcher", "ssh", "-hosts", "node1,node2", "-genv", "MASTER_ADDR", "node1"]),
    "hydra, in an allocation": ("mpich", [*SALLOC, *HYDRA, "-genv", "MASTER_ADDR", "node1"]),
    "Open MPI, ssh": ("openmpi", [*ORTERUN, "-x", "MASTER_ADDR=node1", "-x", "PYTHONPATH"]),
    "srun with PMI-2": ("srun", [*SALLOC, "srun", "--mpi=pmi2"]),
}


# Instead of the others: the same test by the other way of each MPI; the same test with srun and PMI-2, and
# test_mpi_over_two_machines_needs_an_address
@pytest.mark.cases("srun with PMI-2")
@pytest.mark.parametrize("how", BY_HAND)
def test_scripts_started_by_hand_with_mpi(cluster: Cluster, folder: Path, how: str) -> None:
    launcher, argv = BY_HAND[how]
    if "mpiexec.hydra" in argv and shutil.which("mpiexec.hydra") is None:
        pytest.skip("mpich is not installed")
    (folder / "alone.py").write_text(ALONE)
    machine = "hub" if argv[0] == "salloc" else "node1"
    completed = cluster.run(
        machine, *argv, sys.executable, "alone.py", cwd=folder, env=environment(), check=False, timeout=200
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    for rank in range(4):
        assert (folder / f"said{rank}").read_text() == f"node{1 + rank // 2} {rank % 2} 4.0 {launcher}"


def test_mpi_over_two_machines_needs_an_address(cluster: Cluster, folder: Path) -> None:
    if shutil.which("mpiexec.hydra") is None:
        pytest.skip("mpich is not installed")
    (folder / "alone.py").write_text(ALONE)
    argv = [*HYDRA, "-launcher", "ssh", "-hosts", "node1,node2", sys.executable, "alone.py"]
    completed = cluster.run("node1", *argv, cwd=folder, env=environment(), check=False, timeout=200)
    assert completed.returncode != 0
    assert (
        "PMI_SIZE=4, of which 2 are on this machine (MPI_LOCALNRANKS), and MASTER_ADDR is not set" in completed.stderr
    )


def start_sleepers(cluster: Cluster, folder: Path, launcher: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Ranks that ignore SIGTERM, on both machines, once all of them sleep."""
    program = folder / "program.py"
    argv: Sequence[str] = argv_of(launcher, str(program), "sleeps")
    variables = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(folder), **environment(DS_ACCELERATOR="cpu")}
    machine = "node1" if launcher in BY_SSH else "hub"
    process = subprocess.Popen(
        cluster.command(machine, argv, folder), env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    cluster.wait_until(lambda: len(list(folder.glob("asleep*"))) == 4 or process.poll() is not None, 200)
    assert process.poll() is None
    assert len(ranks_left(cluster, program)) >= 4
    return process, program


# Instead of the others: the same test with srun, and test_remote_ranks_end_when_the_launcher_is_killed[pdsh]
@pytest.mark.cases("srun")
@pytest.mark.parametrize("launcher", ["pdsh", "srun"])
def test_an_abort_leaves_no_process_on_any_machine(cluster: Cluster, folder: Path, launcher: str) -> None:
    process, program = start_sleepers(cluster, folder, launcher)
    machine = "node1" if launcher in BY_SSH else "hub"
    for _ in range(3):
        # It may have ended before the last of them.
        cluster.run(machine, "pkill", "-INT", "-f", "^[^ ]*python[^ ]* -m ds_trainer launch", check=False)
        time.sleep(0.5)
    assert process.wait(timeout=100) not in (0, 75)
    cluster.wait_until(lambda: not ranks_left(cluster, program), 30, lambda: str(ranks_left(cluster, program)))


# Instead of the others: the same test with pdsh
@pytest.mark.cases(1)
@pytest.mark.parametrize("victims", ["pdsh", "ds_trainer launch|deepspeed.launcher.runner"])
def test_remote_ranks_end_when_the_launcher_is_killed(cluster: Cluster, folder: Path, victims: str) -> None:
    """A killed pdsh leaves its commands running on other machines; ours detect that the connection is closed."""
    process, program = start_sleepers(cluster, folder, "pdsh")
    cluster.run("node1", "pkill", "-KILL", "-f", f"^([^ ]*python[^ ]* -m )?({victims})( |$)")
    process.wait(timeout=120)
    cluster.wait_until(lambda: not ranks_left(cluster, program), 60, lambda: str(ranks_left(cluster, program)))

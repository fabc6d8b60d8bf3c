"""Ranks under every launcher, from one pure function."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import RankInfo, first_host, known_local_size, likely_rank, resolve_ranks

LAUNCHED = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-010,12]",
    "SLURM_JOB_ID": "4711",
}


def test_plain_python_is_a_world_of_one() -> None:
    assert resolve_ranks({}) == RankInfo(0, 1, 0, "127.0.0.1", 0, "python")


def test_deepspeed_and_torchrun_set_all_variables() -> None:
    info = resolve_ranks(LAUNCHED)
    assert info == RankInfo(3, 8, 1, "node1", 29500, "environment")
    assert info.environment() == LAUNCHED


def test_srun_is_mapped_and_all_ranks_have_one_rendezvous() -> None:
    info = resolve_ranks(STEP)
    assert (info.rank, info.world_size, info.local_rank, info.launcher) == (5, 8, 1, "srun")
    assert info.master_address == "gpu007"
    others = [resolve_ranks({**STEP, "SLURM_PROCID": str(rank)}) for rank in range(8)]
    assert {(other.master_address, other.master_port) for other in others} == {(info.master_address, info.master_port)}
    assert 20000 <= info.master_port < 40000


def test_srun_of_two_jobs_on_one_node_use_different_ports() -> None:
    assert resolve_ranks(STEP).master_port != resolve_ranks({**STEP, "SLURM_JOB_ID": "4712"}).master_port


def test_the_batch_shell_of_a_slurm_job_is_not_a_step() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
    assert resolve_ranks(batch).launcher == "python"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_rejected_with_all_values(missing: str) -> None:
    environment = {name: value for name, value in LAUNCHED.items() if name != missing}
    with pytest.raises(ConfigError, match=f"but not {missing}"):
        resolve_ranks(environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8, which is not below WORLD_SIZE=8"),
        ({"RANK": "two"}, "RANK='two' must be a whole number"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1' must be a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999, which is not a valid port"),
        ({"RANK": "3" * 5000}, "RANK='3{99}' must be a whole number"),  # more digits than Python reads
        ({"WORLD_SIZE": "\u0663"}, "must be a whole number"),  # a digit of another script
        ({"LOCAL_RANK": "\u00b2"}, "must be a whole number"),
        ({"MASTER_PORT": "29500.0"}, "must be a whole number"),
    ],
)
def test_contradictions_are_rejected(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_ranks({**LAUNCHED, **change})


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.5", "9" * 5000, "\u00b2", "\u0663", "0x1", "1_0"])
def test_numbers_of_launchers_that_are_none_end_in_one_error(text: str) -> None:
    """And the printer of that error still finds a rank."""
    step = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    for known in (OMPI, HYDRA, step):
        for name in known:
            if not re.search("RANK$|SIZE|PROCID|NTASKS|NUM_TASKS|JOB_ID|LOCALID", name) or name == "PMIX_RANK":
                continue
            environment = {**known, **MEETING, name: text}
            if known is step:
                del environment["MASTER_PORT"]  # then it follows from the number of the job
            with suppress(ConfigError):
                resolve_ranks(environment)
            assert likely_rank(environment) >= 0
            known_local_size({**environment, "SLURM_NODEID": text, "SLURM_STEP_TASKS_PER_NODE": text})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[007-010,12],login", "gpu007"),
        ("rack[1,3]-ib", "rack1-ib"),
        ("n[5]", "n5"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2283732993",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_mpi_on_one_machine_uses_the_loopback_address() -> None:
    info = resolve_ranks(OMPI)
    assert (info.rank, info.world_size, info.local_rank, info.launcher) == (3, 4, 3, "openmpi")
    assert info.master_address == "127.0.0.1"
    other = resolve_ranks({**OMPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert other.master_port == info.master_port != resolve_ranks({**OMPI, "PMIX_NAMESPACE": "7"}).master_port
    assert resolve_ranks({**HYDRA, "MPI_LOCALNRANKS": "4"}).master_port == 29500


def test_mpi_over_several_machines_needs_an_address() -> None:
    assert resolve_ranks({**HYDRA, **MEETING}) == RankInfo(2, 4, 0, "node1", 29500, "mpich")
    with pytest.raises(ConfigError, match=r"PMI_SIZE=4, of which 2 are on this machine .* MASTER_ADDR is not set"):
        resolve_ranks(HYDRA)
    with pytest.raises(ConfigError, match="an unknown number are on this machine"):
        resolve_ranks({name: value for name, value in HYDRA.items() if name != "MPI_LOCALNRANKS"})


def test_mvapich_is_mapped() -> None:
    mv2 = {name.replace("OMPI", "MV2"): value for name, value in OMPI.items() if name.startswith("OMPI")}
    assert resolve_ranks(mv2) == RankInfo(3, 4, 3, "127.0.0.1", 29500, "mvapich")


def test_one_process_of_mpi_needs_nothing_more() -> None:
    assert resolve_ranks({"PMI_RANK": "0", "PMI_SIZE": "1"}) == RankInfo(0, 1, 0, "127.0.0.1", 0, "mpich")


def test_srun_with_pmi_is_srun() -> None:
    """``srun --mpi=pmi2`` gives the rank twice and the local rank once."""
    info = resolve_ranks({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert (info.rank, info.launcher, info.master_address) == (5, "srun", "gpu007")
    with pytest.raises(ConfigError, match="PMI_RANK=4"):
        resolve_ranks({**STEP, "PMI_RANK": "4", "PMI_SIZE": "8"})


def test_the_launcher_of_a_machine_may_be_a_task_itself() -> None:
    """torchrun and deepspeed, started once on each of two machines by srun or mpirun: the launchers are the tasks."""
    task = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"}
    mpi = {**OMPI, "OMPI_COMM_WORLD_RANK": "1"}
    for outer in (task, mpi):
        for mark in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"):
            assert resolve_ranks({**outer, **LAUNCHED, mark: "1"}).rank == 3
        with pytest.raises(ConfigError, match="contradict"):
            resolve_ranks({**outer, **LAUNCHED})


def test_a_task_may_start_ranks_itself() -> None:
    """One task per machine, which starts ranks itself (torch.multiprocessing.spawn): fewer tasks than ranks."""
    assert resolve_ranks({**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **LAUNCHED}).rank == 3


def test_an_mpi_daemon_is_not_a_rank() -> None:
    """mpirun inside an allocation starts its daemons with srun: their task is not this process."""
    info = resolve_ranks({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **OMPI})
    assert (info.rank, info.launcher) == (3, "openmpi")


@pytest.mark.parametrize(
    "environment",
    [
        {**LAUNCHED, "OMPI_COMM_WORLD_RANK": "0"},
        {**LAUNCHED, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        {**LAUNCHED, "PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2"},
        {**OMPI, "PMI_RANK": "1"},
        {**STEP, **LAUNCHED},  # the same eight, but 5 there and 3 here
        {**STEP, **LAUNCHED, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},  # eight worlds of one
        {**STEP, "WORLD_SIZE": "4"},
        {**OMPI, "WORLD_SIZE": "8"},
        {**LAUNCHED, "LOCAL_RANK": "8"},
        {**LAUNCHED, "LOCAL_SIZE": "1"},
        {**LAUNCHED, "LOCAL_SIZE": "16"},
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **MEETING},
    ],
)
def test_contradictory_variables_are_listed(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="contradict each other") as caught:
        resolve_ranks(environment)
    told = {name: value for name, value in environment.items() if not name.startswith(("PMIX", "SLURM_JOB"))}
    told.pop("SLURM_STEP_NODELIST", None)
    for name, value in told.items():
        assert f"{name}={value}" in str(caught.value)


@pytest.mark.parametrize("environment", [{**STEP, "WORLD_SIZE": "8"}, {**STEP, **MEETING}])
def test_additional_variables_may_agree(environment: dict[str, str]) -> None:
    assert resolve_ranks(environment).rank == 5


@pytest.mark.parametrize("port", ["0", "65536"])
def test_invalid_ports(port: str) -> None:
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port}"):
        resolve_ranks({**LAUNCHED, "MASTER_PORT": port})


def test_the_likely_rank_is_known_even_if_the_environment_is_broken() -> None:
    assert likely_rank(STEP) == 5
    assert likely_rank(OMPI) == 3
    assert likely_rank({"RANK": "1", "WORLD_SIZE": "2"}) == 1
    assert likely_rank({**LAUNCHED, "OMPI_COMM_WORLD_RANK": "0"}) == 3
    assert likely_rank({"RANK": "one", "PMI_RANK": "2"}) == 2
    assert likely_rank({}) == likely_rank({"SLURM_PROCID": "0"}) == 0

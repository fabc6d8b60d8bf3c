"""One pure function works out the ranks under every launcher."""

from __future__ import annotations

import pytest

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import RankInfo, first_host, resolve_ranks

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


def test_deepspeed_and_torchrun_announce_everything() -> None:
    info = resolve_ranks(LAUNCHED)
    assert info == RankInfo(3, 8, 1, "node1", 29500, "environment")
    assert info.environment() == LAUNCHED


def test_srun_is_mapped_and_all_ranks_meet_at_one_place() -> None:
    info = resolve_ranks(STEP)
    assert (info.rank, info.world_size, info.local_rank, info.launcher) == (5, 8, 1, "srun")
    assert info.master_address == "gpu007"
    others = [resolve_ranks({**STEP, "SLURM_PROCID": str(rank)}) for rank in range(8)]
    assert {(other.master_address, other.master_port) for other in others} == {(info.master_address, info.master_port)}
    assert 20000 <= info.master_port < 40000


def test_srun_of_two_jobs_on_one_node_use_different_ports() -> None:
    assert resolve_ranks(STEP).master_port != resolve_ranks({**STEP, "SLURM_JOB_ID": "4712"}).master_port


def test_the_batch_shell_of_a_slurm_job_is_no_step() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
    assert resolve_ranks(batch).launcher == "python"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_is_refused_with_all_values(missing: str) -> None:
    environment = {name: value for name, value in LAUNCHED.items() if name != missing}
    with pytest.raises(ConfigError, match=f"but not {missing}"):
        resolve_ranks(environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8 in a world of WORLD_SIZE=8"),
        ({"RANK": "two"}, "RANK='two' must be a whole number"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1' must be a whole number"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_ranks({**LAUNCHED, **change})


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

"""Which rank this process is, under any launcher: one pure function of the environment.

``deepspeed`` and ``torchrun`` set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``;
``srun`` sets ``SLURM_*``; plain ``python`` sets nothing and is a world of one.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.utils.errors import ConfigError

_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# A SLURM job has no free port to announce, but its id is known to all its ranks.
_SLURM_FIRST_PORT, _SLURM_PORTS = 20000, 20000


@dataclass(frozen=True)
class RankInfo:
    """Place of this process in the job. ``launcher`` is ``"environment"``, ``"srun"`` or ``"python"``.

    A port of 0 says that any free one will do: a world of one has nobody to meet.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """The five variables that torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def resolve_ranks(environment: Mapping[str, str]) -> RankInfo:
    """Work out rank, world size and rendezvous from ``environment``.

    Raises:
        ConfigError: some, but not all, of the launcher's variables are set, or they contradict each other.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_launcher(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _from_slurm_step(environment)
    return RankInfo(0, 1, 0, "127.0.0.1", 0, "python")


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _from_launcher(environment: Mapping[str, str]) -> RankInfo:
    missing = [name for name in _LAUNCHER_NAMES if not environment.get(name)]
    if missing:
        found = ", ".join(f"{name}={environment[name]}" for name in _LAUNCHER_NAMES if environment.get(name))
        raise ConfigError(
            f"The environment says {found}, but not {', '.join(missing)}. Start with `deepspeed`, `torchrun` or "
            "`srun`, or unset these variables to train in one process."
        )
    numbers = {name: _integer(environment, name) for name in _LAUNCHER_NAMES if name != "MASTER_ADDR"}
    _check_rank(numbers["RANK"], numbers["WORLD_SIZE"], "RANK", "WORLD_SIZE")
    return RankInfo(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        environment["MASTER_ADDR"],
        numbers["MASTER_PORT"],
        "environment",
    )


def _from_slurm_step(environment: Mapping[str, str]) -> RankInfo:
    rank = _integer(environment, "SLURM_PROCID")
    world_size = _integer(
        environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    )
    _check_rank(rank, world_size, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if world_size > 1 and not address:
        raise ConfigError(
            "srun gave neither SLURM_STEP_NODELIST nor SLURM_NODELIST: set MASTER_ADDR to the first node."
        )
    if environment.get("MASTER_PORT"):
        port = _integer(environment, "MASTER_PORT")
    else:
        step = environment["SLURM_STEP_ID"]
        offset = int(environment.get("SLURM_JOB_ID", "0")) * 7 + (int(step) if step.isdigit() else 0)
        port = _SLURM_FIRST_PORT + offset % _SLURM_PORTS
    return RankInfo(rank, world_size, _integer(environment, "SLURM_LOCALID"), address or "127.0.0.1", port, "srun")


def first_host(node_list: str) -> str:
    """First host of a SLURM node list: ``gpu[007-010,12],login`` gives ``gpu007``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,\[]*)", node_list)
    if not match:
        return ""
    prefix, ranges, suffix = match.groups()
    first = re.split(r"[,-]", ranges)[0] if ranges else ""
    return prefix + first + (suffix if ranges else "")


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"The environment variable {name}={text!r} must be a whole number; the launcher sets it.")
    return int(text)


def _check_rank(rank: int, world_size: int, rank_name: str, world_name: str) -> None:
    if rank >= world_size:
        raise ConfigError(f"The environment says {rank_name}={rank} in a world of {world_name}={world_size}.")

"""Which GPU a rank works on, under any launcher.

``torchrun`` and ``deepspeed`` show every rank all GPUs of the machine: rank number 3 of a machine takes number 3.
``srun --gpus-per-task=1``, ``--gpu-bind=single:1`` and some MPI set-ups show each rank one GPU, which has index 0
whatever the rank. So the index is 0 where one GPU is visible, else the local rank.

DeepSpeed 0.19.8 takes ``LOCAL_RANK`` for that index (deepspeed/comm/torch.py, runtime/zero/partition_parameters.py); so
do accelerate and transformers: :func:`announce_place` writes it there. The rank on the machine, which decides about
``is_local_process_zero``, is kept beside it (:meth:`ds_trainer.utils.ranks.RankInfo.environment`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import RankInfo, known_local_size

if TYPE_CHECKING:
    import torch

_OMPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_PREFIX = "ds_trainer/devices"


def device_index(info: RankInfo, visible: int, environment: Mapping[str, str]) -> int:
    """Index of the GPU of a rank.

    Args:
        info: the rank.
        visible: how many GPUs this process sees (``torch.cuda.device_count()``).
        environment: says how many ranks the machine has, and what hides GPUs.

    Raises:
        ConfigError: the machine has more ranks than this process sees GPUs, and it sees more than one; on all ranks of
            the machine where the launcher says how many they are.
    """
    if visible == 1:
        return 0
    ranks = max(info.local_rank + 1, known_local_size(environment) or 0)
    if ranks > visible:
        said = [f"{name}={environment[name]}" for name in (*_VISIBLE, *_BOUND) if name in environment]
        raise ConfigError(
            f"Rank {info.rank} has local rank {info.local_rank} on {socket.gethostname()} (launcher: {info.launcher}), "
            f"where at least {ranks} ranks were started, but it sees {visible} GPUs "
            f"({', '.join(said) or 'CUDA_VISIBLE_DEVICES not set'}). Each rank needs a GPU of its own: start {visible} "
            f"ranks on this machine ({_remedy(info.launcher)}), or show each rank exactly one GPU (srun "
            "--gpus-per-task=1, or CUDA_VISIBLE_DEVICES set for each rank)."
        )
    return info.local_rank


def device_of(info: RankInfo, device_type: str) -> torch.device:
    """The device of a rank: ``cpu``, or its GPU.

    Raises:
        ConfigError: see :func:`device_index`.
    """
    import torch

    if device_type != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", device_index(info, torch.cuda.device_count(), os.environ))


def announce_place(info: RankInfo, device: torch.device) -> None:
    """Write the place of this process into the environment, as torch, DeepSpeed and accelerate read it."""
    names = info.environment(device.index if device.type == "cuda" else None)
    if _OMPI_LOCAL_RANK in os.environ:  # DeepSpeed asserts that it equals LOCAL_RANK
        names[_OMPI_LOCAL_RANK] = names["LOCAL_RANK"]
    os.environ.update(names)


def check_own_devices(store: Any, info: RankInfo, uuid: str, timeout: timedelta) -> None:
    """Refuse two ranks on one GPU, which NCCL would end with "Duplicate GPU detected". Collective.

    At most seven operations of the store a rank, whatever the number of ranks.

    Args:
        store: of all ranks, with nothing of an earlier check in it.
        info: this rank.
        uuid: of its GPU.
        timeout: for the ranks that come later.

    Raises:
        ConfigError: on all ranks: two of them have the same GPU.
    """
    mine = f"rank {info.rank} (local rank {info.local_rank}, {_shown(os.environ)})"
    first = store.compare_set(f"{_PREFIX}/gpu/{uuid}", "", mine).decode()
    if first != mine:
        store.set(f"{_PREFIX}/shared", json.dumps([first, mine, socket.gethostname(), uuid, info.launcher]))
    if store.add(f"{_PREFIX}/count", 1) == info.world_size:
        store.set(f"{_PREFIX}/all", "")
    store.wait([f"{_PREFIX}/all"], timeout)
    if store.check([f"{_PREFIX}/shared"]):
        first, other, host, uuid, launcher = json.loads(store.get(f"{_PREFIX}/shared"))
        if info.rank == 0:
            time.sleep(1.0)  # it may hold the store, in which the others read this
        raise ConfigError(
            f"Two ranks of {host} have the same GPU ({uuid}): {first} and {other}; launcher: {launcher}. Each rank "
            "needs one of its own. Where all ranks of a machine see all its GPUs, the local rank chooses: do not set "
            "CUDA_VISIBLE_DEVICES to one of them for all ranks. Under srun ask for --gpus-per-task=1 (or "
            "--gpus-per-node=N without binding)."
        )


def _shown(environment: Mapping[str, str]) -> str:
    said = [f"{name}={environment[name]}" for name in _VISIBLE if name in environment]
    return ", ".join(said) or "CUDA_VISIBLE_DEVICES not set"


def _remedy(launcher: str) -> str:
    return {
        "srun": "--ntasks-per-node of srun",
        "openmpi": "--map-by ppr:N:node of mpirun",
        "mpich": "-ppn of mpiexec",
        "mvapich": "-ppn of mpirun",
    }.get(launcher, "--nproc-per-node of torchrun, --num_gpus of deepspeed")

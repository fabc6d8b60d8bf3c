"""The GPU of a rank, under any launcher.

Under ``torchrun`` and ``deepspeed`` every rank sees all GPUs of the machine, and local rank 3 takes GPU 3. Under ``srun
--gpus-per-task=1``, ``--gpu-bind=single:1`` and some MPI setups each rank sees one GPU, whose index is 0 on every rank.
So the index is 0 if one GPU is visible, otherwise the local rank.

DeepSpeed 0.19.8 uses ``LOCAL_RANK`` as that index (deepspeed/comm/torch.py, runtime/zero/partition_parameters.py); so
do accelerate and transformers: :func:`export_rank` sets it. The local rank, which determines ``is_local_process_zero``,
is kept in another variable (:meth:`ds_trainer.utils.ranks.RankInfo.environment`).
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_memory import free_host_memory
from ds_trainer.utils.ranks import RankInfo, known_local_size

if TYPE_CHECKING:
    import torch

_OMPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_PREFIX = "ds_trainer/devices"
RANKS_SHARE_GPU = "DS_TRAINER_RANKS_SHARE_GPU"
"""Set to ``test``, ranks may have the same GPU: to run the code for several ranks under NCCL where there is only one.
Two ranks of a GPU take turns on it, and their messages go through sockets; nothing is fast."""
_planned: str | None = None
_planned_name: str | None = None


@contextmanager
def planned_device_type(device_type: str, name: str | None = None) -> Iterator[None]:
    """Inside, jobs are checked and configured for ``device_type``, which this machine may lack.

    The device of this process is then the CPU (:mod:`ds_trainer.training.dry_run`).

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        name: name of the GPU, such as ``H100-80GB``; None if it is not known.
    """
    global _planned, _planned_name
    before, (_planned, _planned_name) = (_planned, _planned_name), (device_type, name)
    try:
        yield
    finally:
        _planned, _planned_name = before


def is_planned() -> bool:
    """Whether the job is planned for other devices than those of this machine."""
    return _planned is not None


def planned_name() -> str | None:
    """Name of the planned GPU; None if it is not known, or nothing is planned."""
    return _planned_name


def device_type_of_job() -> str:
    """``"cuda"`` if torch sees a GPU, or if the job is planned for GPUs; else ``"cpu"``. Imports torch."""
    import torch

    if _planned is not None:
        return _planned
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_index(info: RankInfo, visible: int, environment: Mapping[str, str]) -> int:
    """Index of the GPU of a rank.

    Args:
        info: the rank.
        visible: number of GPUs that this process sees (``torch.cuda.device_count()``).
        environment: has the number of ranks on the machine, and the variables that hide GPUs.

    Raises:
        ConfigError: this process sees several GPUs, but fewer than there are ranks on the machine. Raised on all ranks
            of the machine if the launcher sets the number of local ranks.
    """
    if visible == 1:
        return 0
    if ranks_share_gpu(environment):
        return info.local_rank % visible
    ranks = max(info.local_rank + 1, known_local_size(environment) or 0)
    if ranks > visible:
        variables = [f"{name}={environment[name]}" for name in (*_VISIBLE, *_BOUND) if name in environment]
        raise ConfigError(
            f"Rank {info.rank} has local rank {info.local_rank} on {socket.gethostname()} (launcher: {info.launcher}), "
            f"where at least {ranks} ranks were started, but it sees {visible} GPUs "
            f"({', '.join(variables) or 'CUDA_VISIBLE_DEVICES not set'}). Each rank needs its own GPU: start {visible} "
            f"ranks on this machine ({_remedy(info.launcher)}), or make exactly one GPU visible to each rank (srun "
            "--gpus-per-task=1, or CUDA_VISIBLE_DEVICES set for each rank)."
        )
    return info.local_rank


def ranks_share_gpu(environment: Mapping[str, str]) -> bool:
    """Whether :data:`RANKS_SHARE_GPU` is set.

    Raises:
        ConfigError: to another value than ``test``.
    """
    value = environment.get(RANKS_SHARE_GPU, "")
    if value not in ("", "test"):
        raise ConfigError(
            f"{RANKS_SHARE_GPU}={value!r}: it lets several ranks use one GPU to test NCCL's code, which is far slower "
            "than one rank a GPU. Set it to 'test' for that, or unset it."
        )
    return value == "test"


def nccl_on_one_gpu(rank: int) -> dict[str, str]:
    """Variables with which NCCL takes ``rank`` for the only rank of a machine: it refuses ranks that share a GPU only
    within a machine (its ``init.cc``), and messages between machines need no access to each other's memory.
    """
    return {"NCCL_HOSTID": f"ds_trainer-rank-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def device_of(info: RankInfo, device_type: str) -> torch.device:
    """The device of a rank: ``cpu``, or its GPU.

    Raises:
        ConfigError: see :func:`device_index`.
    """
    import torch

    if device_type != "cuda" or _planned is not None:
        return torch.device("cpu")
    return torch.device("cuda", device_index(info, torch.cuda.device_count(), os.environ))


def export_rank(info: RankInfo, device: torch.device) -> None:
    """Set the environment variables from which torch, DeepSpeed and accelerate read rank, world size and GPU index."""
    names = info.environment(device.index if device.type == "cuda" else None)
    if _OMPI_LOCAL_RANK in os.environ:  # DeepSpeed asserts that it equals LOCAL_RANK
        names[_OMPI_LOCAL_RANK] = names["LOCAL_RANK"]
    os.environ.update(names)


def check_distinct_devices(store: Any, info: RankInfo, uuid: str, timeout: timedelta) -> None:
    """Check that no two ranks have the same GPU, for which NCCL reports "Duplicate GPU detected". Collective.

    Costs at most seven store operations per rank, whatever the number of ranks.

    Args:
        store: shared by all ranks, without the values of an earlier check.
        info: this rank.
        uuid: the identity of this rank's GPU.
        timeout: how long to wait for the other ranks.

    Raises:
        ConfigError: on all ranks: two of them have the same GPU, and :data:`RANKS_SHARE_GPU` is not set.
    """
    own = f"rank {info.rank} (local rank {info.local_rank}, {_shown(os.environ)})"
    first = store.compare_set(f"{_PREFIX}/gpu/{uuid}", "", own).decode()
    if first != own:
        store.set(f"{_PREFIX}/shared", json.dumps([first, own, socket.gethostname(), uuid, info.launcher]))
    if store.add(f"{_PREFIX}/count", 1) == info.world_size:
        store.set(f"{_PREFIX}/all", "")
    store.wait([f"{_PREFIX}/all"], timeout)
    if store.check([f"{_PREFIX}/shared"]) and not ranks_share_gpu(os.environ):
        first, other, host, uuid, launcher = json.loads(store.get(f"{_PREFIX}/shared"))
        if info.rank == 0:
            time.sleep(1.0)  # rank 0 may hold the store, and the others still read from it
        raise ConfigError(
            f"Two ranks of {host} have the same GPU ({uuid}): {first} and {other}; launcher: {launcher}. Each rank "
            "needs its own GPU. If all ranks of a machine see all of its GPUs, the local rank selects one: do not set "
            "CUDA_VISIBLE_DEVICES to the same GPU for all ranks. Under srun use --gpus-per-task=1 (or "
            "--gpus-per-node=N without binding)."
        )


def _shown(environment: Mapping[str, str]) -> str:
    variables = [f"{name}={environment[name]}" for name in _VISIBLE if name in environment]
    return ", ".join(variables) or "CUDA_VISIBLE_DEVICES not set"


def _remedy(launcher: str) -> str:
    return {
        "srun": "--ntasks-per-node of srun",
        "openmpi": "--map-by ppr:N:node of mpirun",
        "mpich": "-ppn of mpiexec",
        "mvapich": "-ppn of mpirun",
    }.get(launcher, "--nproc-per-node of torchrun, --num_gpus of deepspeed")


def free_bytes(device: torch.device) -> int:
    """Memory of ``device`` that this process may still use, with what torch caches; a GPU does not wait for it."""
    if device.type == "cpu":
        return free_host_memory()
    if device.type != "cuda":
        return 2**62  # unknown
    import torch

    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def free_memory(device: torch.device) -> None:
    """Collect unreachable objects, and return the memory of a GPU that torch caches."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Starts and stops the process group, under ``deepspeed``, ``torchrun``, ``srun`` and plain ``python``.

Works around two problems of DeepSpeed 0.19.8 on CPUs. Its shared-memory op is compiled at first use (a minute or two,
and a killed compilation blocks every later start on a lock file) and leaves 66 MB per rank in ``/dev/shm``. So the op
is disabled, and this run's buffers are removed at the end in case it was enabled elsewhere.
"""

from __future__ import annotations

import atexit
import gc
import os
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from ds_trainer.engine.scalar_parameters import allow_scalar_parameters
from ds_trainer.parallel.groups import forget_groups
from ds_trainer.utils import failures
from ds_trainer.utils.collective_limit import set_collective_limit
from ds_trainer.utils.connections import end_connections
from ds_trainer.utils.devices import device_of, export_rank
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger, hide_in_logs
from ds_trainer.utils.ranks import RankInfo, free_port, resolve_ranks
from ds_trainer.utils.torch_group import prepare_process, start_torch_group
from ds_trainer.utils.units import counted

logger = get_logger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_SHM_BUFFER_PREFIX = "deepspeed_allreduce_buffer"
_SHM_OP = "deepspeed_shm_comm"
_started: RankInfo | None = None


def start_process_group(device_type: str, timeout: timedelta = timedelta(minutes=30)) -> RankInfo:
    """Joins or creates the process group and selects this rank's device. A second call only changes the time limit.

    Args:
        device_type: ``"cuda"`` (NCCL) or ``"cpu"`` (gloo).
        timeout: time limit of a collective, after which the job ends; also applied to existing groups.

    Returns:
        The rank information of this process.

    Raises:
        ConfigError: the launcher's variables contradict each other, or there is not one GPU per rank.
    """
    global _started
    import torch.distributed as dist

    set_collective_limit(timeout)
    if dist.is_initialized() and _started is not None:
        export_rank(_started, device_of(_started, device_type))  # DeepSpeed reads it for every engine
        return _started
    info = resolve_ranks(os.environ)
    if info.master_port == 0:
        info = replace(info, master_port=free_port())
    export_rank(info, device_of(info, device_type))
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by DeepSpeed when it is imported

    import deepspeed
    from deepspeed.utils.logging import logger as deepspeed_logger

    hide_in_logs("DeepSpeed")
    deepspeed_logger.setLevel("WARNING")  # we print the configuration
    # DeepSpeed 0.19.8 calls functions that torch 2.13 deprecates, at every step of ZeRO-3.
    warnings.filterwarnings(
        "ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated", category=FutureWarning
    )
    # Its barriers, in a world of one, whose group has no device (utils/torch_group.py): prepare_process selects it.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    deepspeed.ops.__compatible_ops__[_SHM_OP] = False
    allow_scalar_parameters()
    if dist.is_initialized():
        prepare_process(info, device_type)
    else:
        start_torch_group(info, device_type, timeout)
    backend = "nccl" if device_type == "cuda" else "gloo"
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)  # uses our group
    if dist.get_world_size() != info.world_size:
        raise ConfigError(
            f"The process group has {counted(dist.get_world_size(), 'rank')}, but the environment sets "
            f"{info.world_size} ({info.launcher}). Let this package start the group, or start the "
            "processes with a launcher."
        )
    _started = info
    atexit.register(stop_process_group)
    atexit.register(failures.end_if_stuck)  # runs before the previous one
    return info


def renew_process_group(device_type: str, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Replaces the process group, which may have an incomplete collective, with one of the same ranks. Collective.

    Engines must be closed. Ends the connections of the old group, which wakes ranks that wait in gloo.

    Raises:
        PeerFailure: not all ranks joined.
    """
    from deepspeed.utils import groups

    info = _started
    assert info is not None  # there was a process group
    failures.leave_group()
    forget_groups()
    groups._release_process_group_references()
    gc.collect()
    end_connections(info.master_port, failures.store())
    store = failures.rendezvous_again()
    start_torch_group(info, device_type, timeout, store)
    failures.watch_peers()


def stop_process_group() -> None:
    """Destroys the process group, if there is one, and removes this run's buffers from shared memory."""
    global _started
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if _started is not None:
        remove_shared_buffers(_started)
        _started = None


def remove_shared_buffers(info: RankInfo, directory: Path = _SHARED_MEMORY) -> list[Path]:
    """Deletes this rank's DeepSpeed all-reduce buffers from ``directory`` and returns their paths.

    DeepSpeed names them by user, rendezvous address, port and rank, so buffers of other jobs are not touched.
    """
    pattern = f"{_SHM_BUFFER_PREFIX}*_{info.master_address}_{info.master_port}_{info.rank}"
    removed = [path for path in directory.glob(pattern) if path.is_file()] if directory.is_dir() else []
    for path in removed:
        path.unlink(missing_ok=True)
    return removed

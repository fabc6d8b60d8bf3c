"""Starts torch's default process group: for ``main_process_first``, for training, and again after a failure.

Nothing else in the package calls ``init_process_group``. It ensures that

* the store has no values of dead ranks, even if ``torchrun --max-restarts`` restarts ranks;
* the device is the rank's own GPU, which no other rank uses (except in tests: ``RANKS_SHARE_GPU``);
* gloo connects two ranks at their first exchange, not all ranks with each other; one barrier follows at once;
* the limit of open files, which includes connections, is as high as the machine allows.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

from ds_trainer.utils.collective_limit import set_collective_limit
from ds_trainer.utils.compiler_caches import local_caches
from ds_trainer.utils.connections import tracked_connections
from ds_trainer.utils.devices import check_distinct_devices, device_of, export_rank, nccl_on_one_gpu, ranks_share_gpu
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.open_files import open_file_problem, raise_open_file_limit
from ds_trainer.utils.ranks import RankInfo
from ds_trainer.utils.store import fresh_store, outlives_ranks

logger = get_logger(__name__)

_PREFIX = "ds_trainer/group"
_numbers = itertools.count()  # a process may leave its group and start another one with the same store


def prepare_process(info: RankInfo, device_type: str) -> None:
    """Set the device, the environment variables and the limits that process groups of this process need.

    Raises:
        ConfigError: this process sees several GPUs, but fewer than there are ranks on its machine.
    """
    device = device_of(info, device_type)
    export_rank(info, device)
    # torch reads it for every gloo group: two ranks connect at their first exchange.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.update(local_caches(os.environ))
    raise_open_file_limit()
    if device_type == "cuda":
        import torch

        torch.cuda.set_device(device)
        if ranks_share_gpu(os.environ):  # NCCL reads the variables when it starts
            os.environ.update(nccl_on_one_gpu(info.rank))


def start_torch_group(info: RankInfo, device_type: str, timeout: timedelta, store: Any = None) -> None:
    """Start torch's default process group, which DeepSpeed uses. Collective.

    Args:
        info: this rank; the port must be known.
        device_type: ``"cuda"`` (NCCL) or ``"cpu"`` (gloo).
        timeout: how long a collective of the group may take.
        store: rendezvous of ranks that have left a previous group; default: the one that the environment names.

    Raises:
        ConfigError: two ranks have the same GPU, or a machine has fewer GPUs than ranks.
        TimeoutError: not all ranks arrived.
    """
    import torch.distributed as dist

    prepare_process(info, device_type)
    set_collective_limit(timeout)
    if info.world_size > 1 and (problem := open_file_problem(info.rank, info.world_size)) is not None:
        logger.warning("Limit of open files: %s. Remedy: ulimit -n 65536 in the batch script.", problem[0])
    with tracked_connections():
        first = store is None
        if store is None:
            store = first_store(info, timeout)
        options: dict[str, Any] = {"rank": info.rank, "world_size": info.world_size, "timeout": timeout}
        # Not in a world of one: with a device, torch creates each later group by splitting (DeepSpeed issue 8248).
        if device_type == "cuda" and info.world_size > 1:
            import torch

            device = device_of(info, device_type)
            if first:
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                check_distinct_devices(store, info, uuid, timeout)
            options["device_id"] = device
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, **options)
        if device_type == "cpu" and info.world_size > 1:
            # Of two ranks gloo has one connect to the other, selected by address. If it dies before it connects, the
            # other waits until the time limit. A barrier connects each rank to log2(world_size) others at once.
            dist.barrier()


def first_store(info: RankInfo, timeout: timedelta) -> Any:
    """The store of the first process group, without values of earlier groups or of dead ranks. Collective.

    Raises:
        TimeoutError: not all ranks arrived.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if outlives_ranks(os.environ) and info.world_size > 1:
        return fresh_store(info.rank, info.world_size, timeout)
    store, _, _ = next(rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"{_PREFIX}/{next(_numbers)}", store)

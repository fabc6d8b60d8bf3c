"""The one place where torch's default process group is made: at the start, before it, and after a failure.

* its store has nothing of dead ranks in it, also where ``torchrun --max-restarts`` starts ranks again;
* its device is the rank's own GPU, and no two ranks have the same one;
* gloo connects ranks when they first talk to each other, not each with all others; all meet in one barrier at once;
* as many files may be open as the machine allows, since a connection is one.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

from ds_trainer.utils.collective_limit import set_collective_limit
from ds_trainer.utils.connections import noted_connections
from ds_trainer.utils.devices import announce_place, check_own_devices, device_of
from ds_trainer.utils.fresh_store import fresh_store, outlives_ranks
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.open_files import open_file_problem, raise_open_file_limit
from ds_trainer.utils.ranks import RankInfo

logger = get_logger(__name__)

_PREFIX = "ds_trainer/group"
_numbers = itertools.count()  # a process may leave its group and start another one in the same store


def prepare_process(info: RankInfo, device_type: str) -> None:
    """What process groups of this process need: its device, its variables in the environment, its limits.

    Raises:
        ConfigError: this process sees GPUs, but fewer than there are ranks on its machine.
    """
    device = device_of(info, device_type)
    announce_place(info, device)
    # Read by torch at every group of gloo: a rank connects to another one when they first exchange something.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    raise_open_file_limit()
    if device_type == "cuda":
        import torch

        torch.cuda.set_device(device)


def start_torch_group(info: RankInfo, device_type: str, timeout: timedelta, store: Any = None) -> None:
    """Make torch's default process group, which DeepSpeed takes over. Collective.

    Args:
        info: this rank; the port must be known.
        device_type: ``"cuda"`` (NCCL) or ``"cpu"`` (gloo).
        timeout: of its collectives.
        store: where ranks that have had a group before meet again; default: what the environment tells of.

    Raises:
        ConfigError: ranks of a machine do not have a GPU each.
        TimeoutError: not all ranks came.
    """
    import torch.distributed as dist

    prepare_process(info, device_type)
    set_collective_limit(timeout)
    if info.world_size > 1 and (problem := open_file_problem(info.rank, info.world_size)) is not None:
        logger.warning("Limit of open files: %s. Remedy: ulimit -n 65536 in the batch script.", problem[0])
    with noted_connections():
        first = store is None
        if store is None:
            store = _first_store(info, timeout)
        place: dict[str, Any] = {"rank": info.rank, "world_size": info.world_size, "timeout": timeout}
        # A rank without others needs no device: with one, torch makes each later group by splitting (DeepSpeed 8248).
        if device_type == "cuda" and info.world_size > 1:
            import torch

            device = device_of(info, device_type)
            if first:
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                check_own_devices(store, info, uuid, timeout)
            place["device_id"] = device
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, **place)
        if device_type == "cpu" and info.world_size > 1:
            # gloo lets one of two ranks connect to the other, chosen by address. If that one dies before it connects,
            # the other waits until the time limit. A barrier connects each rank to log2(world_size) others at once.
            dist.barrier()


def _first_store(info: RankInfo, timeout: timedelta) -> Any:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if outlives_ranks(os.environ) and info.world_size > 1:
        return fresh_store(info.rank, info.world_size, timeout)
    store, _, _ = next(rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"{_PREFIX}/{next(_numbers)}", store)

"""accelerate's process-wide state, attached to the process group that this package started.

Functions of accelerate (``gather_object``, its logging, ``PartialState().is_main_process``) ask a singleton where they
run. Left to itself it looks for GPUs only: on CPUs it would call every rank of a gloo group a world of one, and
"gathering" would silently hand back a rank's own part. Attached here, it sees the group as it is. The state that a
script made by itself is never changed.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import resolve_ranks

_WRITTEN = "LOCAL_WORLD_SIZE"  # accelerate writes a 1 where the launcher said nothing


def attach_accelerate(device_type: str) -> Any:
    """accelerate's ``PartialState``: the existing one, or a new one for the process group that there is.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``, what the process group was started for.
    """
    from accelerate.state import PartialState

    if PartialState._shared_state:
        return PartialState()
    threads, local_world = torch.get_num_threads(), os.environ.get(_WRITTEN)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*OMP_NUM_THREADS.*")  # about the number that is put back below
        state = PartialState(cpu=device_type == "cpu")
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if local_world is None:
        os.environ.pop(_WRITTEN, None)
    # It took LOCAL_RANK, which is the index of the GPU: 0 on every rank where each is shown one.
    state.local_process_index = resolve_ranks(os.environ).local_rank
    return state


def matching_state(device_type: str) -> Any:
    """:func:`attach_accelerate`, for an operation that relies on it.

    Raises:
        ConfigError: a state made earlier knows another number of processes than the process group has.
    """
    state = attach_accelerate(device_type)
    ranks = distributed.world_size()
    if state.num_processes != ranks:
        remedy = "say cpu=True to them" if device_type == "cpu" else "start them with the same launcher"
        raise ConfigError(
            f"accelerate's state was made before the process group: it counts num_processes={state.num_processes}, but "
            f"the group has {ranks} ranks, so that accelerate would gather over the wrong ones. Make PartialState() or "
            f"Accelerator() after train(), or {remedy}."
        )
    return state

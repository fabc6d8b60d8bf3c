"""accelerate's process-wide state, attached to the process group that this package started.

Functions of accelerate (``gather_object``, its logging, ``PartialState().is_main_process``) read rank and world size
from a singleton. By default it looks for GPUs only: on CPUs it would treat every rank of a gloo group as a world of
one, and "gathering" would silently return only the local values. Attached here, it uses the existing group. A state
that a script has created is never changed.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import resolve_ranks

_WRITTEN = "LOCAL_WORLD_SIZE"  # accelerate sets it to 1 if the launcher has not set it


def attach_accelerate(device_type: str) -> Any:
    """accelerate's ``PartialState``: the existing one, or a new one for the existing process group.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``, the device type of the process group.
    """
    from accelerate.state import PartialState

    if PartialState._shared_state:
        return PartialState()
    threads, local_world = torch.get_num_threads(), os.environ.get(_WRITTEN)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*OMP_NUM_THREADS.*"
        )  # about the number of threads, which is restored below
        state = PartialState(cpu=device_type == "cpu")
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if local_world is None:
        os.environ.pop(_WRITTEN, None)
    # It has read LOCAL_RANK, which is the GPU index: 0 on every rank if each rank sees one GPU.
    state.local_process_index = resolve_ranks(os.environ).local_rank
    return state


def matching_state(device_type: str) -> Any:
    """:func:`attach_accelerate`, checked against the process group.

    Raises:
        ConfigError: a state that was created earlier has another number of processes than the process group.
    """
    state = attach_accelerate(device_type)
    ranks = distributed.world_size()
    if state.num_processes != ranks:
        remedy = "pass cpu=True to it" if device_type == "cpu" else "start it with the same launcher"
        raise ConfigError(
            f"accelerate's state was created before the process group: it has num_processes={state.num_processes}, but "
            f"the group has {ranks} ranks, so accelerate would gather over the wrong ranks. Create PartialState() or "
            f"Accelerator() after train(), or {remedy}."
        )
    return state

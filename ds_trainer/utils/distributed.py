"""What ranks say to each other about control flow. Everything works without a process group too (one process).

Ranks decide together: whatever changes control flow (stop, save, evaluate) goes through :func:`agree` at a step
boundary, so that no rank can wait in a collective that the others never enter.

Control flow lives on the host, so decisions travel between hosts: over a group for tensors in host memory (gloo), once
:func:`use_host_group` has named it. The device is not asked then, and goes on computing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def is_initialized() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Global rank; 0 in a single process."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 in a single process."""
    return dist.get_world_size() if is_initialized() else 1


def group_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks of ``group``; default: all."""
    return world_size() if group is None else group.size()


def collective_device() -> torch.device:
    """The device on which small tensors must lie to take part in a collective of the default group."""
    if is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_host: tuple[ProcessGroup, ProcessGroup] | None = None  # the world, and all of its ranks for tensors in host memory


def use_host_group(group: ProcessGroup | None) -> None:
    """Send decisions and objects over ``group``: all ranks, for tensors in host memory. None: as before it was named.

    On all ranks at the same point of the program.
    """
    global _host
    _host = None if group is None or dist.group.WORLD is None else (dist.group.WORLD, group)


def host_group() -> ProcessGroup | None:
    """All ranks for tensors in host memory; None where there is no such group (yet), and the default one must do."""
    if _host is not None and _host[0] is dist.group.WORLD:
        return _host[1]
    return dist.group.WORLD if is_initialized() and dist.get_backend() == "gloo" else None


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: torch.Tensor, *, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Sum ``tensor`` over the ranks of ``group`` (default: all), in place.

    With ``async_op`` the returned handle must be waited for; None where there is one rank.
    """
    if group_size(group) == 1:
        return None
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def agree(votes: torch.Tensor) -> list[int]:
    """The largest of all ranks' ``votes``, element by element. The one primitive behind every shared decision.

    Waits for the slowest host; for the device only before there is a :func:`host_group`.
    """
    return [int(vote) for vote in largest(votes).tolist()]


def largest(values: torch.Tensor) -> torch.Tensor:
    """The largest of all ranks' ``values``, element by element, in host memory. Collective: one message."""
    if world_size() > 1:
        group = host_group()
        values = values if group is not None else values.to(collective_device())
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values.cpu()


def alike(text: str) -> bool:
    """Whether all ranks say the same ``text``. Collective; two numbers travel, however many ranks there are."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    largest, smallest = agree(torch.tensor([number, -number]))
    return largest == -smallest


class Agreement:
    """:func:`agree` on its way: begun at one step boundary and read at a later one, so that nobody waits. Collective.

    Args:
        votes: integers, in host memory; not to be used by others any more.
    """

    def __init__(self, votes: torch.Tensor) -> None:
        self._votes = votes
        self._work: Work | None = None
        if world_size() > 1:
            group = host_group()
            self._votes = votes if group is not None else votes.to(collective_device())
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[int]:
        """What all ranks said. To be asked for by all of them at the same boundary."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return [int(vote) for vote in self._votes.tolist()]


_told = itertools.count()


def told_by_main(value: Any) -> Any:
    """The main process's ``value`` (plain data) on every rank, however long it takes to get there.

    A collective has a time limit; this has none. The others ask the store of the process group ten times a second.
    """
    if world_size() == 1:
        return value
    store = dist.distributed_c10d._get_default_store()
    key = f"ds_trainer/told/{next(_told)}"
    if rank() == 0:
        store.set(key, json.dumps(value))
        return value
    while not store.check([key]):
        time.sleep(0.1)
    return json.loads(store.get(key))


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order. For small things outside the hot path.

    Every rank unpickles what all ranks say: 40 ms a thousand ranks. :func:`gather_to_main` spares the others that.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def gather_to_main(value: Any) -> list[Any] | None:
    """``value`` of every rank, in rank order, on rank 0; None elsewhere. For small things outside the hot path."""
    if world_size() == 1:
        return [value]
    main = rank() == 0
    said = bytearray() if main else bytearray(pickle.dumps(value))  # rank 0 may have much to say to itself
    device = collective_device()
    (longest,) = agree(torch.tensor([len(said)]))
    own = torch.zeros(longest, dtype=torch.uint8)
    if said:
        own[: len(said)] = torch.frombuffer(said, dtype=torch.uint8)
    heard = torch.empty(world_size() * longest, dtype=torch.uint8, device=device)
    # Not a gather: NCCL would connect rank 0 to every other rank, and keep the buffers of those connections.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(heard, own.to(device))
    if not main:
        return None
    rows = heard.cpu().view(world_size(), longest).numpy()
    return [value, *(pickle.loads(row.data) for row in rows[1:])]


def broadcast_object(value: Any) -> Any:
    """Rank 0's ``value``, on every rank. It must be picklable; for small things outside the hot path."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]

"""Decisions that all ranks take together, and exchange of small objects. Works without a process group (one process).

Whatever changes control flow (stop, save, evaluate) goes through :func:`agree` at a step boundary, so that no rank can
wait in a collective that the others never enter.

Decisions are made on the host, so they are exchanged over a group for tensors in host memory (gloo) once
:func:`use_host_group` has set it. They do not synchronize the device, which continues to compute.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_trainer.utils.store import RankStore

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
    """The device of small tensors for collectives of the default group."""
    if is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_host: tuple[ProcessGroup, ProcessGroup] | None = (
    None  # the default group, and the group of all ranks for tensors in host memory
)


def use_host_group(group: ProcessGroup | None) -> None:
    """Exchange decisions and objects over ``group``: all ranks, for tensors in host memory. None: the default group.

    Must be called on all ranks at the same point of the program.
    """
    global _host
    _host = None if group is None or dist.group.WORLD is None else (dist.group.WORLD, group)


def host_group() -> ProcessGroup | None:
    """The group of all ranks for tensors in host memory; None if there is none and the default group must be used."""
    if _host is not None and _host[0] is dist.group.WORLD:
        return _host[1]
    return dist.group.WORLD if is_initialized() and dist.get_backend() == "gloo" else None


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: torch.Tensor, *, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Sum ``tensor`` over the ranks of ``group`` (default: all), in place.

    With ``async_op`` the caller must wait for the returned handle; it is None if there is one rank.
    """
    if group_size(group) == 1:
        return None
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def agree(votes: torch.Tensor) -> list[int]:
    """The element-wise maximum of all ranks' ``votes``. The primitive of every shared decision. Collective.

    Waits for the slowest host; synchronizes the device only if there is no :func:`host_group`.
    """
    return [int(vote) for vote in largest(votes).tolist()]


def largest(values: torch.Tensor) -> torch.Tensor:
    """The element-wise maximum of all ranks' ``values``, in host memory. Collective: one all-reduce."""
    if world_size() > 1:
        group = host_group()
        values = values if group is not None else values.to(collective_device())
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values.cpu()


def alike(text: str) -> bool:
    """Whether all ranks pass the same ``text``. Collective: an all-reduce of two numbers."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    largest, smallest = agree(torch.tensor([number, -number]))
    return largest == -smallest


class Agreement:
    """An asynchronous :func:`agree`: started at one step boundary and read at a later one. Collective.

    Args:
        votes: integers in host memory; owned by this object from now on.
    """

    def __init__(self, votes: torch.Tensor) -> None:
        self._votes = votes
        self._work: Work | None = None
        if world_size() > 1:
            group = host_group()
            self._votes = votes if group is not None else votes.to(collective_device())
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[int]:
        """The element-wise maximum. All ranks must call it at the same boundary."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return [int(vote) for vote in self._votes.tolist()]


_broadcasts = itertools.count()


def broadcast_from_main(value: Any) -> Any:
    """The main process's ``value`` (plain data) on every rank, without a time limit.

    Collectives have a time limit; the store, which the other ranks poll, has none.
    """
    if world_size() == 1:
        return value
    store, key = RankStore("ds_trainer/broadcasts"), str(next(_broadcasts))
    if rank() == 0:
        store.set(key, value)
        return value
    return store.wait(key)


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order. For small things outside the hot path.

    Every rank unpickles the values of all ranks: 40 ms per thousand ranks. :func:`gather_to_main` avoids that.
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
    data = bytearray() if main else bytearray(pickle.dumps(value))  # rank 0 need not send its own value
    device = collective_device()
    (longest,) = agree(torch.tensor([len(data)]))
    sent = torch.zeros(longest, dtype=torch.uint8)
    if data:
        sent[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    received = torch.empty(world_size() * longest, dtype=torch.uint8, device=device)
    # Not a gather: NCCL would connect rank 0 to every other rank and keep buffers for each connection.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(received, sent.to(device))
    if not main:
        return None
    rows = received.cpu().view(world_size(), longest).numpy()
    return [value, *(pickle.loads(row.data) for row in rows[1:])]


def broadcast_object(value: Any) -> Any:
    """Rank 0's ``value``, on every rank. It must be picklable; for small things outside the hot path."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]

"""Decisions that all ranks take together, and exchange of small objects. Works without a process group (one process).

Whatever changes control flow (stop, save, evaluate) goes through :func:`agree` at a step boundary, so that no rank can
wait in a collective that the others never enter.

Decisions are made on the host, so they are exchanged over a group for tensors in host memory (gloo) once
:func:`use_host_group` has set it. They do not synchronize the device, which continues to compute. gloo's own all-reduce
and all-gather are rings: with 1,024 ranks 2,046 messages, each of which waits for the one before. Here every rank sends
ten, to the ranks 1, 2, 4 ... 512 places further; inside of a machine first, if its ranks have consecutive numbers.

Collectives and votes have a time limit (``ddp_timeout``). A barrier and an exchange of objects have none, because they
follow work on a disk or a network that may take longer on one rank, such as a save or a download.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_trainer.utils.collective_limit import collective_limit
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.store import RankStore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

logger = get_logger(__name__)


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


# The default group, and the group of all ranks for tensors in host memory.
_host: tuple[ProcessGroup, ProcessGroup] | None = None


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
    return dist.group.WORLD if is_initialized() and dist.get_backend() != "nccl" else None


_NO_LIMIT = timedelta(days=365)
_TAG = 0x645374  # of the messages below; pipelines and rings of users have small numbers
_MOST_BYTES = 2**16  # of a vote that is sent whole in every message


def barrier() -> None:
    """Wait for all ranks, without a time limit. Does not wait for devices if there is a :func:`host_group`."""
    if world_size() == 1:
        return
    group = host_group()
    if group is not None:
        connect(group, _NO_LIMIT)
    else:
        await_ranks()
        dist.barrier()


def connect(group: ProcessGroup, limit: timedelta) -> None:
    """Connect this rank to those with which it will exchange decisions over ``group``. Collective.

    Raises:
        RuntimeError: they do not answer within ``limit``.
    """
    _largest_of(torch.zeros(1, dtype=torch.int64), group, limit)


def _largest_of(values: torch.Tensor, group: ProcessGroup, limit: timedelta) -> torch.Tensor:
    """The element-wise maximum over ``group``: after round k it is that of the ``2 ** k`` ranks up to this one."""
    size, distance = group.size(), 1
    while distance < size:
        values = torch.maximum(values, _swap(values, group, distance, limit))
        distance *= 2
    return values


def _rows_of(values: torch.Tensor, group: ProcessGroup, limit: timedelta) -> torch.Tensor:
    """The ``values`` of every rank of ``group``, in rank order: ``[ranks, *values.shape]``."""
    rows, size = values[None], group.size()  # of this rank and those before it
    while len(rows) < size:
        rows = torch.cat([rows, _swap(rows[: size - len(rows)], group, len(rows), limit)])
    return rows.flip(0).roll(group.rank() + 1, 0)


def _swap(values: torch.Tensor, group: ProcessGroup, distance: int, limit: timedelta) -> torch.Tensor:
    """Send ``values`` to the rank ``distance`` places further; returns what the rank as far behind has sent."""
    rank, size = group.rank(), group.size()
    values = values.contiguous()
    received = values.clone()
    sent: Any = dist.isend(values, group=group, group_dst=(rank + distance) % size, tag=_TAG)
    arriving: Any = dist.irecv(received, group=group, group_src=(rank - distance) % size, tag=_TAG)
    arriving.wait(limit)
    sent.wait(limit)
    return received


def all_reduce_sum(tensor: torch.Tensor, *, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Sum ``tensor`` over the ranks of ``group`` (default: all), in place.

    With ``async_op`` the caller must wait for the returned handle; it is None if there is one rank.
    """
    if group_size(group) == 1:
        return None
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def agree(votes: torch.Tensor, patient: bool = False) -> list[int]:
    """The element-wise maximum of all ranks' ``votes``. The primitive of every shared decision. Collective.

    Waits for the slowest host; synchronizes the device only if there is no :func:`host_group`.

    Args:
        votes: integers in host memory.
        patient: there is no time limit, for votes on the result of work on a disk.
    """
    if patient and host_group() is None:
        await_ranks()
    return [int(vote) for vote in largest(votes, _NO_LIMIT if patient else None).tolist()]


def largest(values: torch.Tensor, limit: timedelta | None = None) -> torch.Tensor:
    """The element-wise maximum of all ranks' ``values``, in host memory. Collective.

    Args:
        values: the same shape and dtype on all ranks, in host memory.
        limit: for small values over a :func:`host_group`; default: the usual one.
    """
    if world_size() == 1:
        return values
    group = host_group()
    if group is not None and values.nbytes <= _MOST_BYTES:
        return _largest_of(values, group, limit or collective_limit())
    values = values if group is not None else values.to(collective_device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values.cpu()


def gather_numbers(values: torch.Tensor) -> torch.Tensor:
    """The ``values`` of every rank, of one shape and in host memory: ``[ranks, *values.shape]``. Collective."""
    if world_size() == 1:
        return values[None]
    group = host_group()
    if group is not None:
        return _rows_of(values, group, collective_limit())
    received = values.new_empty(world_size() * values.numel(), device=collective_device())
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(received, values.flatten().to(received.device))
    return received.cpu().view(world_size(), *values.shape)


def alike(text: str) -> bool:
    """Whether all ranks pass the same ``text``. Collective: a vote on two numbers."""
    return alike_each(text)[0]


def alike_each(*texts: str) -> list[bool]:
    """:func:`alike` for several texts in one vote."""
    numbers = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") for text in texts]
    votes = agree(torch.tensor([*numbers, *(-number for number in numbers)]))
    return [votes[index] == -votes[index + len(texts)] for index in range(len(texts))]


class Agreement:
    """An asynchronous :func:`agree`: started at one step boundary and read at a later one. Collective.

    It runs in a thread of gloo, as a ring, which takes longer than :func:`agree`; nobody waits for it.

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


_turns: tuple[Any, Iterator[int]] = (None, itertools.count())


def _turn() -> int:
    """How often the ranks of this process group have met in the store; the same on all of them."""
    global _turns
    if _turns[0] is not dist.group.WORLD:  # ranks that have left a group in its middle have met differently often
        _turns = (dist.group.WORLD, itertools.count())
    return next(_turns[1])


REPORT_SECONDS = 60.0
"""After which ranks are named for which the others wait."""
_MOST_NAMED = 8


def await_ranks(limit: timedelta | None = None) -> float:
    """Wait in the store until all ranks have called this; the first one to do so names those that are late. Collective.

    Needs no group in host memory, and connects no rank to another.

    Args:
        limit: default: none.

    Returns:
        Seconds that this rank has waited.

    Raises:
        TimeoutError: ranks are missing; the message names them.
    """
    began, turn = time.monotonic(), _turn()
    if world_size() == 1:
        return 0.0
    store = RankStore("ds_trainer/arrivals")
    store.append(f"{turn}/ranks", [rank(), socket.gethostname()])
    arrived = store.add(f"{turn}/count")
    if arrived == world_size():
        store.set(f"{turn}/all", True)
        store.delete(*(f"{turn - 1}/{key}" for key in ("ranks", "count", "all")))  # which all ranks have read
    report_at = REPORT_SECONDS if arrived == 1 else math.inf

    def missing() -> str:
        here = {number for number, _ in store.get_list(f"{turn}/ranks")}
        late = [number for number in range(world_size()) if number not in here]
        more = f" and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
        return f"{len(late)} of {world_size()} ranks: {', '.join(map(str, late[:_MOST_NAMED]))}{more}"

    def expired() -> bool:
        nonlocal report_at
        waited = time.monotonic() - began
        if waited > report_at:
            report_at *= 2
            logger.warning("Rank %d has waited %.0f s for %s.", rank(), waited, missing())
        return limit is not None and waited > limit.total_seconds()

    try:
        store.wait(f"{turn}/all", expired)
    except TimeoutError:
        raise TimeoutError(
            f"Rank {rank()} has waited {time.monotonic() - began:.0f} s (ddp_timeout) for {missing()}. They have not "
            "come this far, although they have joined the process group."
        ) from None
    waited = time.monotonic() - began
    if report_at > REPORT_SECONDS and arrived == 1:
        last, host = store.get_list(f"{turn}/ranks")[-1]
        logger.warning("All ranks are here; the last one was rank %d on %s, %.0f s late.", last, host, waited)
    return waited


def broadcast_from_main(value: Any) -> Any:
    """The main process's ``value`` (plain data) on every rank, without a time limit.

    Collectives have a time limit; the store, which the other ranks poll, has none.
    """
    if world_size() == 1:
        return value
    store, key = RankStore("ds_trainer/broadcasts"), str(_turn())
    if rank() == 0:
        store.set(key, value)
        return value
    received = store.wait(key)
    if store.add(f"{key}/read") == world_size() - 1:
        store.delete(key, f"{key}/read")
    return received


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order. For small things outside the hot path. No time limit.

    Every rank unpickles the values of all ranks: 40 ms per thousand ranks. :func:`gather_to_main` avoids that.
    """
    if world_size() == 1:
        return [value]
    return [pickle.loads(row.data) for row in _pickled_rows(pickle.dumps(value))]


def gather_to_main(value: Any) -> list[Any] | None:
    """``value`` of every rank, in rank order, on rank 0; None elsewhere. For small things outside the hot path. No time
    limit.
    """
    if world_size() == 1:
        return [value]
    main = rank() == 0
    rows = _pickled_rows(b"" if main else pickle.dumps(value))  # rank 0 need not send its own value
    return [value, *(pickle.loads(row.data) for row in rows[1:])] if main else None


def _pickled_rows(data: bytes) -> Any:
    """The ``data`` of every rank, padded: ``[ranks, bytes]`` in numpy. Collective, without a time limit.

    Not a gather: NCCL would connect rank 0 to every other rank and keep buffers for each connection.
    """
    (longest,) = agree(torch.tensor([len(data)]), patient=True)
    sent = torch.zeros(longest, dtype=torch.uint8)
    if data:
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return gather_numbers(sent).numpy()


def broadcast_object(value: Any, source: int = 0) -> Any:
    """The ``value`` of rank ``source``, on every rank. It must be picklable; for small things outside the hot path.

    No time limit.
    """
    if world_size() == 1:
        return value
    barrier()
    values = [value]
    dist.broadcast_object_list(values, src=source, group=host_group())
    return values[0]

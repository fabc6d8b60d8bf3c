"""Votes of all ranks that do not ask the device: over a group of gloo, or over the rendezvous store.

With NCCL, a group of gloo is made beside it for what concerns the host. gloo looks for a network by itself: it listens
at the address that the host's name resolves to, or at that of the interface GLOO_SOCKET_IFNAME. Where names resolve to
a management network or to 127.0.1.1, NCCL works and gloo waits for ever. :func:`reachable_group` finds that out within
a time limit, on all ranks alike, and :class:`StoreVotes` does without.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = get_logger(__name__)

CONNECT_SECONDS = 60.0
"""How long ranks may take to find each other over gloo."""
_PREFIX = "ds_trainer/votes"


class HostVotes(Protocol):
    """The element-wise maximum of all ranks' integers, without the device."""

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Vote without waiting; what comes back waits for the others and gives the result. Collective, in order."""
        ...


class GroupVotes:
    """Votes by all-reduce.

    Args:
        group: all ranks, for tensors in host memory.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        votes = torch.tensor(list(values))
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def finish() -> list[int]:
            work.wait()
            return [int(value) for value in votes.tolist()]

        return finish


class StoreVotes:
    """Votes over the store of the process group; one at a time.

    A vote costs each rank four operations of the store (two when it begins), whatever the number of ranks, and another
    while it waits for a slower one. The rank that comes last reads all votes at once (a few bytes a rank), and answers.
    Nothing blocks in the store: its connection may be shared.

    Args:
        store: of all ranks; default: that of the process group.
        world_size: how many vote; default: that of the process group.
        name: below which nothing else is in the store, alike on all ranks; default: one that rank 0 draws (collective).
    """

    def __init__(self, store: Any = None, world_size: int | None = None, name: str = "") -> None:
        self._store: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._world_size = dist.get_world_size() if world_size is None else world_size
        self._name = f"{_PREFIX}/{name or distributed.broadcast_object(secrets.token_hex(8))}"
        self._turn = 0

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self._turn += 1
        store, name = self._store, f"{self._name}/{self._turn}"
        store.append(f"{name}/votes", json.dumps(list(values)) + "\n")
        if store.add(f"{name}/count", 1) == self._world_size:
            votes = [json.loads(line) for line in store.get(f"{name}/votes").decode().splitlines()]
            store.set(f"{name}/result", json.dumps([max(column) for column in zip(*votes, strict=True)]))
            # All have begun this turn, so that all have read the one before.
            for key in ("votes", "count", "result"):
                store.delete_key(f"{self._name}/{self._turn - 1}/{key}")
        return lambda: self._finish(f"{name}/result")

    def _finish(self, key: str) -> list[int]:
        pause, seconds = 0.001, collective_limit().total_seconds()
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s for the votes of the other ranks ({key})")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return [int(value) for value in json.loads(self._store.get(key))]


def host_votes(group: ProcessGroup | None) -> HostVotes:
    """Votes over ``group``, or over the store where there is none. Collective."""
    return StoreVotes() if group is None else GroupVotes(group)


def reachable_group(make: Callable[[timedelta], ProcessGroup], seconds: float | None = None) -> ProcessGroup | None:
    """The group that ``make`` gives; None, on all ranks, if the ranks of one of these groups cannot reach each other.

    Collective.

    Args:
        make: makes a group of gloo with this limit for its collectives; one that works gets that of the others.
        seconds: how long ranks may take to find each other; default: ``CONNECT_SECONDS``.
    """
    limit = timedelta(seconds=CONNECT_SECONDS if seconds is None else seconds)
    if dist.get_backend() not in ("nccl", "gloo"):
        return make(limit)  # no ranks to be reached
    group, failure = None, ""
    try:
        group = make(limit)
        dist.all_reduce(torch.zeros(1), group=group, async_op=True).wait(limit)
    except (RuntimeError, ValueError) as error:
        failure = str(error).splitlines()[0]
        logger.debug("rank %d: gloo does not connect: %s", dist.get_rank(), failure)
    if not StoreVotes().begin([int(bool(failure))])()[0]:
        assert group is not None  # nothing failed
        dist.distributed_c10d._set_pg_timeout(collective_limit(), group)
        return group
    if dist.get_rank() == 0:
        logger.warning(
            "Ranks cannot reach each other over gloo%s: votes on stopping go over the rendezvous store. The host names "
            "probably resolve to another network than the one between the machines; set GLOO_SOCKET_IFNAME to the "
            "interface of that one (`ip -br address` lists them; NCCL_SOCKET_IFNAME is often set to it already).",
            f" ({failure})" if failure else "",
        )
    return None

"""Votes of all ranks that do not involve the device: over a gloo group, or over the rendezvous store.

Next to NCCL, a gloo group is created for tensors in host memory. gloo selects its own network: it listens on the
address that the host name resolves to, or on the interface GLOO_SOCKET_IFNAME. If host names resolve to a management
network or to 127.0.1.1, NCCL works and gloo hangs. :func:`reachable_group` detects that within a time limit, with the
same result on all ranks, and :class:`StoreVotes` needs no gloo.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit, limit_group
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.store import RankStore, expiry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = get_logger(__name__)

CONNECT_SECONDS = 60.0
"""How long ranks may take to connect over gloo."""
_PREFIX = "ds_trainer/votes"


class HostVotes(Protocol):
    """The element-wise maximum of all ranks' integers, computed on the host."""

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start a vote; the returned function waits for the other ranks and returns the result. Collective."""
        ...


class GroupVotes:
    """Votes by all-reduce.

    Args:
        group: all ranks, for tensors in host memory.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin a vote; the returned function waits for its result. Collective."""
        votes = torch.tensor(list(values))
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def finish() -> list[int]:
            work.wait()
            return [int(value) for value in votes.tolist()]

        return finish


class StoreVotes:
    """Votes over the rendezvous store; one at a time.

    A vote costs each rank four store operations (two when it begins), whatever the number of ranks, plus polls while it
    waits for a slower rank. The last rank to vote reads all votes at once (a few bytes per rank) and writes the result.

    Args:
        store: connection of all ranks; default: :func:`~ds_trainer.utils.store.side_store`.
        world_size: number of voters; default: that of the process group.
        name: a name in the store that is unused and the same on all ranks; default: a random one (collective).
    """

    def __init__(self, store: Any = None, world_size: int | None = None, name: str = "") -> None:
        self._world_size = dist.get_world_size() if world_size is None else world_size
        prefix = f"{_PREFIX}/{name or distributed.broadcast_object(secrets.token_hex(8))}"
        self._store = RankStore(prefix, store, self._world_size)
        self._turn = 0

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin a vote; the returned function waits for its result. Collective."""
        self._turn += 1
        store, turn = self._store, self._turn
        store.append(f"{turn}/votes", list(values))
        if store.add(f"{turn}/count") == self._world_size:
            votes = store.get_list(f"{turn}/votes")
            store.set(f"{turn}/result", [max(column) for column in zip(*votes, strict=True)])
            # All ranks have begun this turn, so all have read the result of the previous one.
            store.delete(*(f"{turn - 1}/{key}" for key in ("votes", "count", "result")))
        return lambda: [
            int(value) for value in store.wait(f"{turn}/result", expiry(collective_limit().total_seconds()))
        ]


def host_votes(group: ProcessGroup | None) -> HostVotes:
    """Votes over ``group``, or over the store if it is None. Collective."""
    return StoreVotes() if group is None else GroupVotes(group)


def reachable_group(make: Callable[[timedelta], ProcessGroup], seconds: float | None = None) -> ProcessGroup | None:
    """The group that ``make`` returns; None on all ranks if the ranks of any such group cannot connect. Collective.


    Args:
        make: creates a gloo group with the given time limit; a working group then gets the usual limit.
        seconds: how long ranks may take to connect; default: ``CONNECT_SECONDS``.
    """
    limit = timedelta(seconds=CONNECT_SECONDS if seconds is None else seconds)
    if dist.get_backend() not in ("nccl", "gloo"):
        return make(limit)  # no network
    distributed.await_ranks(collective_limit())  # a rank that comes late is not a rank that cannot be reached
    group, failure = None, ""
    try:
        group = make(limit)
        distributed.connect(group, limit)
    except (RuntimeError, ValueError) as error:
        failure = str(error).splitlines()[0]
        logger.debug("rank %d: gloo does not connect: %s", dist.get_rank(), failure)
    if not StoreVotes().begin([int(bool(failure))])()[0]:
        assert group is not None  # no rank failed
        limit_group(group)
        return group
    if dist.get_rank() == 0:
        logger.warning(
            "Ranks cannot reach each other over gloo%s; votes on stopping use the rendezvous store instead. Host names "
            "probably resolve to another network than the one between the machines. Set GLOO_SOCKET_IFNAME to the "
            "interface of that network (`ip -br address` lists all; NCCL_SOCKET_IFNAME is often set to it already).",
            f" ({failure})" if failure else "",
        )
    return None

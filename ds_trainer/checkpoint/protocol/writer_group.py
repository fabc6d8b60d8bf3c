"""Which ranks write to the same directory, and which of them leads the group."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Communicator(Protocol):
    """Exchanges plain data between ranks; :mod:`ds_trainer.utils.distributed` is one implementation. Collective.

    Values of all ranks go to rank 0 only: at 1,024 ranks, no other rank should spend time on them.
    """

    def gather_to_main(self, value: Any, /) -> list[Any] | None:
        """Returns the values of all ranks, in rank order, on rank 0; None on the others."""

    def broadcast_object(self, value: Any, /) -> Any:
        """Returns rank 0's value."""


@dataclass(frozen=True)
class WriterGroup:
    """The ranks that share this rank's directory.

    Attributes:
        rank: this rank.
        ranks: the ranks of this directory, in order.
        node, nodes: index of this directory, and number of directories.
        leaders: for every rank, the leader of its directory; empty if all ranks share one directory.
    """

    rank: int
    ranks: Sequence[int]
    node: int
    nodes: int
    leaders: Sequence[int]

    @classmethod
    def of(cls, on_each_node: bool, rank: int, world_size: int, communicator: Communicator) -> WriterGroup:
        """The group of this rank: all ranks, or with ``on_each_node`` those of its machine (then collective)."""
        if not on_each_node:
            return cls(rank, range(world_size), 0, 1, ())
        hosts = communicator.broadcast_object(communicator.gather_to_main(socket.gethostname()))
        nodes = list(dict.fromkeys(hosts))
        groups = [tuple(r for r, host in enumerate(hosts) if host == node) for node in nodes]
        node = nodes.index(hosts[rank])
        return cls(rank, groups[node], node, len(nodes), tuple(groups[nodes.index(host)][0] for host in hosts))

    @property
    def is_leader(self) -> bool:
        """Whether this rank creates, publishes and removes the checkpoints of its directory."""
        return self.leader == self.rank

    @property
    def leader(self) -> int:
        """The rank that does so for this directory."""
        return self.ranks[0]

    def work_slice(self) -> slice:
        """This rank's part of a work list that the ranks of the directory divide among themselves."""
        return slice(self.ranks.index(self.rank), None, len(self.ranks))

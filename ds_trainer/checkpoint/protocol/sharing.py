"""Which ranks write into the same directory, and which of them speaks for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Messages(Protocol):
    """How ranks hear from each other; :mod:`ds_trainer.utils.distributed` is one way. Collective. Plain data only.

    What all ranks say goes to rank 0 alone: at a thousand ranks nobody else has the time to read it.
    """

    def gather_to_main(self, value: Any, /) -> list[Any] | None:
        """The value of every rank, in rank order, on rank 0; None elsewhere."""

    def broadcast_object(self, value: Any, /) -> Any:
        """Rank 0's value."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that share this rank's directory.

    Attributes:
        rank: this one.
        ranks: those of this directory, in order.
        node, nodes: the how manieth directory this is, of how many.
        firsts: of every rank's directory the rank that speaks for it; empty where all ranks share one.
    """

    rank: int
    ranks: Sequence[int]
    node: int
    nodes: int
    firsts: Sequence[int]

    @classmethod
    def of(cls, on_each_node: bool, rank: int, world_size: int, messages: Messages) -> Sharing:
        """All ranks share one directory, or with ``on_each_node`` those of a machine. Collective then."""
        if not on_each_node:
            return cls(rank, range(world_size), 0, 1, ())
        hosts = messages.broadcast_object(messages.gather_to_main(socket.gethostname()))
        nodes = list(dict.fromkeys(hosts))
        members = [tuple(r for r, host in enumerate(hosts) if host == node) for node in nodes]
        node = nodes.index(hosts[rank])
        return cls(rank, members[node], node, len(nodes), tuple(members[nodes.index(host)][0] for host in hosts))

    @property
    def commits(self) -> bool:
        """Whether this rank makes, publishes and removes the checkpoints of its directory."""
        return self.first == self.rank

    @property
    def first(self) -> int:
        """The rank that does so for this directory."""
        return self.ranks[0]

    def share(self) -> slice:
        """This rank's part of a list of things to do, of which every rank of the directory does some."""
        return slice(self.ranks.index(self.rank), None, len(self.ranks))

"""Which ranks write into the same directory, and which of them speaks for it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Gather = Callable[[Any], list[Any]]
"""``gather(value)``: the value of every rank, in rank order. Collective."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that share this rank's directory.

    Attributes:
        rank: this one.
        ranks: those of this directory, in order.
        node, nodes: the how manieth directory this is, of how many.
        firsts: of every rank's directory the rank that speaks for it.
    """

    rank: int
    ranks: tuple[int, ...]
    node: int
    nodes: int
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, on_each_node: bool, rank: int, gather: Gather) -> Sharing:
        """All ranks share one directory, or with ``on_each_node`` those of a machine. Collective."""
        hosts = gather(socket.gethostname() if on_each_node else "")
        nodes = list(dict.fromkeys(hosts))
        members = [tuple(r for r, host in enumerate(hosts) if host == node) for node in nodes]
        node = nodes.index(hosts[rank])
        return cls(rank, members[node], node, len(nodes), tuple(members[nodes.index(host)][0] for host in hosts))

    @property
    def commits(self) -> bool:
        """Whether this rank makes, publishes and removes the checkpoints of its directory."""
        return self.firsts[self.rank] == self.rank

    @property
    def first(self) -> int:
        """The rank that does so for this directory."""
        return self.firsts[self.rank]

    def share(self) -> slice:
        """This rank's part of a list of things to do, of which every rank of the directory does some."""
        return slice(self.ranks.index(self.rank), None, len(self.ranks))

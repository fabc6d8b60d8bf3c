"""``ModulePaths``: the orders in which modules have run so far, as agreed by all ranks.

A tree whose nodes are points in a forward and backward pass, and whose edges are the next event: a module, a gradient,
or the end. All ranks hold the same tree and are at the same node, so each of them knows without communication whether
the others may have done something else.
"""

from __future__ import annotations

from collections.abc import Hashable

LONGEST = 1_000_000
"""Maximum number of nodes. The tree of a model that takes a new path each time (LayerDrop) is reset at this size."""


class Node:
    """A point in a pass.

    Attributes:
        depth: events since the start of the pass.
        only: the event after it if only one is known, else None.
        then: the node after that event.
        known: the nodes after all known events, by event.
    """

    __slots__ = ("depth", "known", "only", "then")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.known: dict[int, Node] = {}
        self.only: int | None = None
        self.then = self


class ModulePaths:
    """The tree, and this rank's position in it.

    Attributes:
        node: the position. Where an event is its ``only`` one, ``then`` is the next position, and nobody is asked.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._size = 0
        self.node = Node()

    def begin(self, kind: Hashable) -> None:
        """Starts a pass; passes of each ``kind`` (training, evaluation) have a separate tree."""
        if self._size > LONGEST:
            self._roots, self._size = {}, 0
        self.node = self._roots.setdefault(kind, Node())

    def take(self, event: int) -> None:
        """Follows ``event``, which may be new."""
        node = self.node
        if event not in node.known:
            node.known[event] = Node(node.depth + 1)
            node.only, node.then = (event, node.known[event]) if len(node.known) == 1 else (None, node)
            self._size += 1
        self.node = node.known[event]

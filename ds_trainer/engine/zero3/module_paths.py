"""``ModulePaths``: the orders in which modules have run so far, as agreed by all ranks.

A tree whose nodes are points in a forward and backward pass, and whose edges are the next event: a module, a gradient,
or the end. All ranks hold the same tree and are at the same node, so each of them knows without communication whether
the others may have done something else.
"""

from __future__ import annotations

from collections.abc import Hashable

Node = dict[int, "Node"]

LONGEST = 1_000_000
"""Maximum number of nodes. The tree of a model that takes a new path each time (LayerDrop) is reset at this size."""


class ModulePaths:
    """The tree, and this rank's position in it.

    Attributes:
        depth: events since the start of the pass.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._node: Node = {}
        self._size = 0
        self.depth = 0

    def begin(self, kind: Hashable) -> None:
        """Starts a pass; passes of each ``kind`` (training, evaluation) have a separate tree."""
        if self._size > LONGEST:
            self._roots, self._size = {}, 0
        self._node = self._roots.setdefault(kind, {})
        self.depth = 0

    def follow(self, event: int) -> bool:
        """Follows ``event`` if it is the only known continuation, and returns whether it is."""
        node = self._node
        if len(node) != 1 or event not in node:
            return False
        self._node = node[event]
        self.depth += 1
        return True

    @property
    def known(self) -> tuple[int, ...]:
        """The known continuations at the current node."""
        return tuple(self._node)

    def take(self, event: int) -> None:
        """Follows ``event``, which may be new."""
        if event not in self._node:
            self._node[event] = {}
            self._size += 1
        self._node = self._node[event]
        self.depth += 1

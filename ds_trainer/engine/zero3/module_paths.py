"""``ModulePaths``: in which orders modules have run so far, as all ranks have agreed.

A tree. Its nodes are places in a forward and backward pass, its edges what came next there: a module, a gradient, the
end. All ranks hold the same tree and stand at the same place of it, so each of them knows by itself whether the others
can have done anything else.
"""

from __future__ import annotations

from collections.abc import Hashable

Node = dict[int, "Node"]

LONGEST = 1_000_000
"""Nodes that are kept. A model that takes another way each time (layers dropped at random) begins anew then."""


class ModulePaths:
    """The tree, and where this rank is in it.

    Attributes:
        place: steps since the pass began.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._node: Node = {}
        self._size = 0
        self.place = 0

    def begin(self, kind: Hashable) -> None:
        """A pass begins; passes of another ``kind`` (training, evaluation) have a tree of their own."""
        if self._size > LONGEST:
            self._roots, self._size = {}, 0
        self._node = self._roots.setdefault(kind, {})
        self.place = 0

    def follow(self, event: int) -> bool:
        """Take the step ``event`` if it is the only one that was ever taken here."""
        node = self._node
        if len(node) != 1 or event not in node:
            return False
        self._node = node[event]
        self.place += 1
        return True

    @property
    def known(self) -> tuple[int, ...]:
        """What came next at this place so far."""
        return tuple(self._node)

    def take(self, event: int) -> None:
        """Take the step ``event``, which may be new."""
        if event not in self._node:
            self._node[event] = {}
            self._size += 1
        self._node = self._node[event]
        self.place += 1

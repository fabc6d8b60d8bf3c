"""``Deviations``: a rank that is about to run a module where all ranks ran another one before asks the others.

The training threads of the others cannot answer: if they continue as before, they wait in a gather. So the question
goes through the store of the process group, and a thread of each rank answers if its rank has not moved between two
looks. Nothing is sent while all ranks repeat what they did before.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ds_trainer.utils.threads import new_thread

LOOK_SECONDS = 2.0  # a rank that stands still for other reasons (a save) asks the store as often
_LONGEST_PAUSE = 0.25

Position = tuple[int, int]
"""Number of the forward pass, and steps since it began."""


class Deviations:
    """What one group of ranks asks each other.

    Args:
        name: of this object in the store; the same on all ranks of the group, and no other's.
        ranks: how many the group has.
        position: where this rank is.
        describe: what this rank says of itself to a rank that has gone another way.
    """

    def __init__(
        self, name: str, ranks: int, position: Callable[[], Position], describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._name, self._ranks, self._position, self._describe = name, ranks, position, describe
        self._number = 0  # of deviations that all ranks had alike
        self._store: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The thread must not keep an engine alive that nobody has closed.
        new_thread(_watch, weakref.ref(self), self._closed, name="ds_trainer-deviations").start()

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()

    def ask(self, position: Position, event: int) -> dict[str, Any] | None:
        """Wait until all ranks have come to ``position``.

        Returns:
            None where all of them go on with ``event``; else what another one says of itself.
        """
        store = self._connection()
        own = {**self._describe(), "position": list(position), "event": event}
        said = store.compare_set(self._key("claim"), "", json.dumps(own))
        first: dict[str, Any] = json.loads(said)
        if first["position"] != own["position"] or first["event"] != event:
            store.compare_set(self._key("conflict"), "", json.dumps(own))
            return first
        came, pause = store.add(self._key("count"), 1), 0.005
        while came < self._ranks:
            if store.check([self._key("conflict")]):
                other: dict[str, Any] = json.loads(store.get(self._key("conflict")))
                return other
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            came = store.add(self._key("count"), 0)
        self._number += 1
        return None

    def look(self, before: Any) -> Any:
        """Answer who asks, where this rank is still where it was at the last look; returns where it is."""
        here = (self._number, self._position())
        if here == before:
            self._answer(*here)
        return here

    def _answer(self, number: int, position: Position) -> None:
        store = self._connection()
        if not store.check([self._key("claim", number)]):
            return
        claim = json.loads(store.get(self._key("claim", number)))
        if position > tuple(claim["position"]):
            store.compare_set(self._key("conflict", number), "", json.dumps(self._describe()))

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{self._name}/{self._number if number is None else number}/{what}"

    def _connection(self) -> Any:
        """A connection of its own: that of the process group may be busy. Made when there is something to ask."""
        with self._lock:
            if self._store is None:
                default: Any = dist.distributed_c10d._get_default_store()
                self._store = default.clone()
            return self._store


def _watch(deviations: weakref.ref[Deviations], closed: threading.Event) -> None:
    before: Any = None
    while not closed.wait(LOOK_SECONDS):
        asked = deviations()
        if asked is None:
            return
        try:
            before = asked.look(before)
        except (RuntimeError, OSError):
            return  # the rank that holds the store is gone: utils.failures tells of that
        del asked

"""``Deviations``: a rank that is about to deviate from the known order of modules first queries the other ranks.

The training threads of the other ranks cannot answer: if they continue as before, they are blocked in a gather. So the
query goes through the store of the process group, and a background thread of each rank answers if its rank has not
moved between two checks. Nothing is sent while all ranks follow the known order.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ds_trainer.utils.store import GuardedStore, pause_of, side_store
from ds_trainer.utils.threads import new_thread

LOOK_SECONDS = 2.0  # also the interval of store queries while a rank is idle for other reasons (a save)
_LONGEST_PAUSE = 0.25

Position = tuple[int, int]
"""Number of the forward pass, and steps since it began."""


class Deviations:
    """Queries about deviations within one group of ranks.

    Args:
        name: key prefix in the store; the same on all ranks of the group, and unique to the group.
        ranks: size of the group.
        position: returns this rank's position.
        describe: returns this rank's description for error messages on ranks that took another path.
    """

    def __init__(
        self, name: str, ranks: int, position: Callable[[], Position], describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._name, self._ranks, self._position, self._describe = name, ranks, position, describe
        self._number = 0  # deviations so far in which all ranks agreed
        self._store: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The thread must not keep an unclosed engine alive.
        new_thread(_watch, weakref.ref(self), self._closed, name="ds_trainer-deviations").start()

    def close(self) -> None:
        """Stops the background thread."""
        self._closed.set()

    def ask(self, position: Position, event: int) -> dict[str, Any] | None:
        """Waits until all ranks have reached ``position``.

        Returns:
            None if all of them continue with ``event``; else the description of a rank that does not.
        """
        store = self._connection()
        claim = {**self._describe(), "position": list(position), "event": event}
        first: dict[str, Any] = json.loads(store.compare_set(self._key("claim"), "", json.dumps(claim)))
        if first["position"] != claim["position"] or first["event"] != event:
            store.compare_set(self._key("conflict"), "", json.dumps(claim))
            return first
        arrived, pause = store.add(self._key("count"), 1), 0.005
        while arrived < self._ranks:
            if store.check([self._key("conflict")]):
                other: dict[str, Any] = json.loads(store.get(self._key("conflict")))
                return other
            time.sleep(pause)
            pause = min(2 * pause, pause_of(2 * self._ranks, _LONGEST_PAUSE))
            arrived = store.add(self._key("count"), 0)
        self._number += 1
        return None

    def look(self, before: Any) -> Any:
        """Answers a pending query if this rank has not moved since the last check; returns its position."""
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
        """A separate connection, created at first use: that of the process group may be busy."""
        with self._lock:
            if self._store is None:
                self._store = GuardedStore(side_store())
            return self._store


def _watch(deviations: weakref.ref[Deviations], closed: threading.Event) -> None:
    before: Any = None
    pause = LOOK_SECONDS
    while not closed.wait(pause):
        watched = deviations()
        if watched is None:
            return
        try:
            before = watched.look(before)
            pause = pause_of(watched._ranks, LOOK_SECONDS)
        except (RuntimeError, OSError):
            return  # the rank that hosts the store is gone; utils.failures reports it
        del watched

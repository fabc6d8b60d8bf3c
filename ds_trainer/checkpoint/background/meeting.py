"""Where ranks meet in the background: over the store of the process group, never in its collectives.

A collective of a thread would mix with those of the training, would run into a time limit while a slow disk is waited
for, and would hang where a rank is gone. The store has none of that: values are put there and looked for now and then.

Rank 0 reads what all ranks say, and says what all read: nobody else's work grows with their number. Values are JSON:
whoever reaches the port of the store can write there, and reading a pickle may run any code.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.side_store import side_store

logger = get_logger(__name__)

T = TypeVar("T")

_PREFIX = "ds_trainer/saves"
_POLL_SECONDS = 0.1
_POLLS_A_SECOND = 10_000  # of all ranks together: they ask one store


class RankMissing(RuntimeError):
    """Not all ranks came to the meeting."""


class Meeting:
    """All ranks, one thread of each at a time. To be made by all of them together: collective."""

    def __init__(self) -> None:
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self._name = f"{_PREFIX}/{distributed.broadcast_object(secrets.token_hex(8))}"
        self._turn = 0
        self._patience: tuple[float, float] | None = None
        self._store: Any = None
        if self.world_size > 1:
            self._store = side_store()

    def give_up_after(self, seconds: float) -> None:
        """From now on wait no longer than this at a time, for ranks that may be gone; from any thread."""
        self._patience = (seconds, time.monotonic())

    def gather_to_main(self, value: Any) -> list[Any] | None:
        """Every rank's ``value`` (plain data; tuples become lists), in rank order, on rank 0; None elsewhere.

        Raises:
            RankMissing: a rank did not come.
        """
        if self._store is None:
            return [value]
        self._turn += 1
        turn = f"{self._name}/{self._turn}"
        if self.rank != 0:
            self._call(lambda store: store.set(f"{turn}/{self.rank}", json.dumps(value)))
            self._call(lambda store: store.add(f"{turn}/came", 1))
            return None
        self._until(lambda store: store.add(f"{turn}/came", 0) >= self.world_size - 1, "the other ranks")
        # All have read what they were told before.
        self._call(lambda store: store.delete_key(f"{self._name}/{self._turn - 1}/told"))
        keys = [f"{turn}/{rank}" for rank in range(1, self.world_size)]
        return [value, *(json.loads(said) for said in self._call(lambda store: store.multi_get(keys)))]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value`` (plain data; tuples become lists).

        Raises:
            RankMissing: it did not come.
        """
        if self._store is None:
            return value
        self._turn += 1
        key, before = f"{self._name}/{self._turn}/told", f"{self._name}/{self._turn - 1}"
        if self.rank == 0:
            self._call(lambda store: store.set(key, json.dumps(value)))
            self._call(lambda store: store.delete_key(f"{before}/came"))
            return value
        self._until(lambda store: store.check([key]), "rank 0")
        self._call(lambda store: store.delete_key(f"{before}/{self.rank}"))  # it has been heard
        return json.loads(self._call(lambda store: store.get(key)))

    def leave(self, seconds: float = 5.0) -> None:
        """Before a process ends: the one that holds the store waits a moment until the others have read what it said.

        They need not come.
        """
        if self._store is None:
            return
        key = f"{self._name}/left"
        self._call(lambda store: store.add(key, 1))
        if self.rank == 0:
            self.give_up_after(seconds)
            try:
                self._until(lambda store: store.add(key, 0) >= self.world_size, "the other ranks")
            except RankMissing as error:
                logger.debug("%s", error)

    def _until(self, comes: Callable[[Any], bool], who: str) -> None:
        pause, began = 0.001, time.monotonic()
        longest = max(_POLL_SECONDS, self.world_size / _POLLS_A_SECOND)
        while not self._call(comes):
            if self._patience is not None and time.monotonic() > self._patience[0] + max(began, self._patience[1]):
                raise RankMissing(f"rank {self.rank} waited in vain for {who}")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _call(self, ask: Callable[[Any], T]) -> T:
        try:
            return ask(self._store)
        except (RuntimeError, OSError) as error:
            raise RankMissing(f"the rank that holds the rendezvous store is gone ({str(error)[:200]})") from error

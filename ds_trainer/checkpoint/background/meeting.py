"""Where ranks meet in the background: over the store of the process group, never in its collectives.

A collective of a thread would mix with those of the training, would run into a time limit while a slow disk is waited
for, and would hang where a rank is gone. The store has none of that: values are put there and looked for now and then.

Values are JSON: whoever reaches the port of the store can write there, and reading a pickle may run any code.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.side_store import side_store

logger = get_logger(__name__)

_PREFIX = "ds_trainer/saves"


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

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain data; tuples become lists), in rank order, on every rank.

        Raises:
            RankMissing: a rank did not come.
        """
        if self._store is None:
            return [value]
        self._turn += 1
        self._set(f"{self._turn}/{self.rank}", value)
        if self.rank == 0:
            values = [self._get(f"{self._turn}/{rank}") for rank in range(self.world_size)]
            self._set(f"{self._turn}/all", values)
        else:
            values = self._get(f"{self._turn}/all")
        self._forget(self._turn - 1)
        return list(values)

    def leave(self, seconds: float = 5.0) -> None:
        """Before a process ends: the one that holds the store waits a moment until the others have read what it said.

        They need not come.
        """
        if self._store is None:
            return
        self._turn += 1
        self._set(f"{self._turn}/{self.rank}", None)
        if self.rank == 0:
            self.give_up_after(seconds)
            try:
                for rank in range(self.world_size):
                    self._get(f"{self._turn}/{rank}")
            except RankMissing as error:
                logger.debug("%s", error)

    def _forget(self, turn: int) -> None:
        # When the main process has heard everybody at a turn, nobody reads anything of the turn before any more.
        if turn >= 1 and self._store is not None:
            self._store.delete_key(f"{self._name}/{turn}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"{self._name}/{turn}/all")

    def _set(self, key: str, value: Any) -> None:
        self._store.set(f"{self._name}/{key}", json.dumps(value))

    def _get(self, key: str) -> Any:
        store, name, pause, began = self._store, f"{self._name}/{key}", 0.001, time.monotonic()
        try:
            while not store.check([name]):
                if self._patience is not None and time.monotonic() > self._patience[0] + max(began, self._patience[1]):
                    raise RankMissing(f"rank {self.rank} waited in vain for the other ranks ({key})")
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            return json.loads(store.get(name))
        except RankMissing:
            raise
        except (RuntimeError, OSError) as error:
            raise RankMissing(f"the rank that holds the rendezvous store is gone ({error})") from error

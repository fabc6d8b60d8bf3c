"""Communication between the ranks' save threads, over the process group's store instead of its collectives.

A collective in a thread would mix with those of the training, would time out while a disk is slow, and would hang if a
rank has exited. The store has none of these problems: values are set, and polled from time to time.

Rank 0 reads what all ranks set, and sets what all of them read, so no other rank's work grows with the number of ranks.
Values are JSON: anything that reaches the port of the store can write there, and reading a pickle may run any code.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.store import RankStore

logger = get_logger(__name__)

T = TypeVar("T")

_PREFIX = "ds_trainer/saves"


class RankMissingError(RuntimeError):
    """Another rank did not reach the barrier."""


class StoreBarrier:
    """Gathers and broadcasts between all ranks, from one thread per rank at a time.

    Constructing it is collective.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        prefix = f"{_PREFIX}/{distributed.broadcast_object(secrets.token_hex(8))}"
        self._turn = 0
        self._timeout: tuple[float, float] | None = None
        self._store = RankStore(prefix) if self.world_size > 1 else None

    def set_timeout(self, seconds: float) -> None:
        """From now on, limit each wait for other ranks, which may have exited. Call from any thread."""
        self._timeout = (seconds, time.monotonic())

    def gather_to_main(self, value: Any) -> list[Any] | None:
        """Returns the ``value`` of every rank (plain data; tuples become lists), in rank order, on rank 0; else None.

        Raises:
            RankMissingError: a rank did not arrive.
        """
        if self._store is None:
            return [value]
        self._turn += 1
        turn = self._turn
        values = self._call(lambda store: store.gather(f"{turn}", value, self.rank, self._expiry()), "the other ranks")
        if self.rank == 0:  # All ranks have read the previous broadcast.
            self._call(lambda store: store.delete(f"{turn - 1}/broadcast"))
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's ``value`` (plain data; tuples become lists).

        Raises:
            RankMissingError: rank 0 did not arrive.
        """
        if self._store is None:
            return value
        self._turn += 1
        key, before = f"{self._turn}/broadcast", self._turn - 1
        if self.rank == 0:
            self._call(lambda store: store.set(key, value))
            self._call(lambda store: store.delete(f"{before}/count"))
            return value
        found = self._call(lambda store: store.wait(key, self._expiry()), "rank 0")
        self._call(lambda store: store.delete(f"{before}/{self.rank}"))  # rank 0 has read it
        return found

    def leave(self, seconds: float = 5.0) -> None:
        """Before a process ends: rank 0, which may host the store, waits briefly for the others to read its broadcast.

        Other ranks that do not arrive are not an error.
        """
        if self._store is None:
            return
        self._call(lambda store: store.add("left"))
        if self.rank == 0:
            self.set_timeout(seconds)
            try:
                left = self._call(lambda store: store.wait_for_count("left", self.world_size, self._expiry()))
                logger.debug("%d of %d ranks have left", left, self.world_size)
            except RankMissingError as error:
                logger.debug("%s", error)

    def _expiry(self) -> Callable[[], bool]:
        began = time.monotonic()

        def expired() -> bool:
            return self._timeout is not None and time.monotonic() > self._timeout[0] + max(began, self._timeout[1])

        return expired

    def _call(self, ask: Callable[[RankStore], T], awaited: str = "") -> T:
        assert self._store is not None  # there are other ranks
        try:
            return ask(self._store)
        except TimeoutError as error:
            raise RankMissingError(f"rank {self.rank} timed out waiting for {awaited}") from error
        except (RuntimeError, OSError) as error:
            raise RankMissingError(f"the rank that hosts the rendezvous store is gone ({str(error)[:200]})") from error

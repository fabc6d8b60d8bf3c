"""``StatusBoard``: values that threads of all ranks share through the store of the process group.

Collectives cannot be used: they belong to the training, and hang when it hangs. Only :meth:`StatusBoard.wait` waits for
another rank. But one process serves the store: if it hangs, every call hangs.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from ds_trainer.utils import distributed
from ds_trainer.utils.outcomes import host_name
from ds_trainer.utils.store import RankStore, expiry

_PREFIX = "ds_trainer/health"


class StatusBoard:
    """Values by key; values are plain data. Creating it is collective. Only one thread may use it.

    Attributes:
        keeper: host and process ID of rank 0.

    All methods raise RuntimeError or OSError if the process that serves the store has ended.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        here = host_name(), os.getpid()
        name, *keeper = distributed.broadcast_object((secrets.token_hex(8), *here))
        self.keeper: tuple[str, int] = (keeper[0], keeper[1])
        self._values: dict[str, str] = {}  # used if there is one rank
        self._store = RankStore(f"{_PREFIX}/{name}") if self.world_size > 1 else None
        self.put(f"members/{self.rank}", here)

    def member(self, rank: int) -> tuple[str, int] | None:
        """Host and process ID of a rank; None if it never started."""
        if rank == 0:
            return self.keeper
        text = self.get(f"members/{rank}")
        return None if text is None else (text[0], text[1])

    def put(self, key: str, value: Any) -> None:
        """Set ``key`` to ``value``."""
        if self._store is None:
            self._values[key] = json.dumps(value)
        else:
            self._store.set(key, value)

    def get(self, key: str) -> Any:
        """The value of ``key``; None if it is not set."""
        values = self.get_all([key])
        return None if values is None else values[0]

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        """The values of ``keys``; None unless all of them are set."""
        if self._store is None:
            return [json.loads(self._values[key]) for key in keys] if self._values.keys() >= set(keys) else None
        return self._store.get_all(keys)

    def get_some(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of those of ``keys`` that are set; in one exchange if all are."""
        values = self.get_all(keys) if keys else []
        if values is not None:
            return dict(zip(keys, values, strict=True))
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def append(self, key: str, value: Any) -> None:
        """Add ``value`` to the list under ``key``."""
        if self._store is None:
            self._values[key] = json.dumps([*self.get_list(key), value])
        else:
            self._store.append(key, value)

    def get_list(self, key: str) -> list[Any]:
        """All values that ranks have appended to ``key``."""
        if self._store is None:
            return list(json.loads(self._values.get(key, "[]")))
        return self._store.get_list(key)

    def wait(self, key: str, seconds: float) -> Any:
        """The value of ``key``, which another rank will set.

        Raises:
            TimeoutError: it did not within ``seconds``.
        """
        if self._store is None:
            raise TimeoutError(f"there is no other rank to set {key}")
        return self._store.wait(key, expiry(seconds))

    def claim(self, key: str, value: Any) -> bool:
        """Set ``key`` to ``value`` unless another rank was first. Returns whether this rank was first."""
        if self._store is None:
            return self._values.setdefault(key, text := json.dumps(value)) is text
        return self._store.set_first(key, value)

    def drop(self, key: str) -> None:
        """Delete ``key``."""
        if self._store is None:
            self._values.pop(key, None)
        else:
            self._store.delete(key)

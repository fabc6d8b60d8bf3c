"""``Board``: notes that threads of all ranks leave for each other, in the store of the process group.

Not in its collectives: those belong to the training, and hang when it does. Nothing here waits for another rank; but
the store lies in one process, and where that one stands still, every call does.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from ds_trainer.utils import distributed
from ds_trainer.utils.side_store import side_store

_PREFIX = "ds_trainer/health"


class Board:
    """Notes by name; values are plain data. To be made by all ranks together: collective. One thread may use it.

    Attributes:
        keeper: host and process number of rank 0.

    All methods raise RuntimeError or OSError where the process that holds the store is gone.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        here = socket.gethostname(), os.getpid()
        name, *keeper = distributed.broadcast_object((secrets.token_hex(8), *here))
        self._name = f"{_PREFIX}/{name}"
        self.keeper: tuple[str, int] = (keeper[0], keeper[1])
        self._store: Any = None
        self._notes: dict[str, str] = {}  # where there is one rank
        if self.world_size > 1:
            self._store = side_store()
        self.put(f"members/{self.rank}", here)

    def member(self, rank: int) -> tuple[str, int] | None:
        """Host and process number of a rank; None where it never came."""
        if rank == 0:
            return self.keeper
        found = self.get(f"members/{rank}")
        return None if found is None else (found[0], found[1])

    def put(self, key: str, value: Any) -> None:
        """Leave ``value`` under ``key``."""
        if self._store is None:
            self._notes[key] = json.dumps(value)
        else:
            self._store.set(f"{self._name}/{key}", json.dumps(value))

    def get(self, key: str) -> Any:
        """What is under ``key``; None where nothing is."""
        found = self.get_all([key])
        return None if found is None else found[0]

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        """What is under ``keys``; None unless there is something under each of them."""
        if self._store is None:
            return [json.loads(self._notes[key]) for key in keys] if self._notes.keys() >= set(keys) else None
        names = [f"{self._name}/{key}" for key in keys]
        if not self._store.check(names):
            return None
        values = self._store.multi_get(names)
        return list(json.loads(b"[" + b",".join(values) + b"]"))  # at once: there may be thousands

    def claim(self, key: str, value: Any) -> bool:
        """Leave ``value`` under ``key`` unless another rank was first; whether it was this one."""
        if self._store is None:
            return self._notes.setdefault(key, text := json.dumps(value)) is text
        text = json.dumps(value)
        return bool(self._store.compare_set(f"{self._name}/{key}", "", text).decode() == text)

    def drop(self, key: str) -> None:
        """Remove what is under ``key``."""
        if self._store is None:
            self._notes.pop(key, None)
        else:
            self._store.delete_key(f"{self._name}/{key}")

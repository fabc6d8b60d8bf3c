"""The rendezvous store: small JSON values that ranks leave for each other outside of collectives.

``RankStore`` is the only client of the store in this package. No method of it waits inside the store: what has to be
awaited is polled, with pauses that keep all ranks together below ``POLLS_PER_SECOND``. Each operation is one short
exchange. Values are JSON, because anyone who can reach the port can write to the store, and unpickling runs code.

Every rank has two connections to the process that holds the store. The one of the process group may be busy: while NCCL
or gloo connect ranks, it waits for values that other ranks have yet to write, and blocks every other user. Threads that
watch other ranks (failures, health, saves) therefore share a second connection, :func:`side_store`.

Python ends a thread that is still inside the store when the interpreter ends by unwinding its stack, which C++ answers
with SIGABRT: the exit code of a run that is done would be 134. So no thread enters it once the exit has begun.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLLS_PER_SECOND = 2_000  # of all ranks together, since one process answers them
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1  # seconds between two polls

_lock = threading.Lock()
_side: tuple[Any, Any] | None = None  # the store of a process group, and its clone
_AT_EXIT_SECONDS = 3.0  # that an operation may take which is under way at the exit
_guarded: weakref.WeakSet[GuardedStore] = weakref.WeakSet()


class GuardedStore:
    """The operations of ``store``, one at a time; none begins once the interpreter ends: its thread waits instead."""

    def __init__(self, store: Any) -> None:
        self._store, self._busy = store, threading.Lock()
        _guarded.add(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            with self._busy:
                return getattr(self._store, name)(*arguments)

        return guarded

    def close(self, seconds: float = _AT_EXIT_SECONDS) -> None:
        """Wait until the operation that is under way has ended, at most ``seconds``; no other one follows."""
        self._busy.acquire(timeout=seconds)


@atexit.register
def _close_all() -> None:
    for one in list(_guarded):
        one.close()


def group_store() -> Any:
    """The store of the default process group. torch has no public accessor for it."""
    return dist.distributed_c10d._get_default_store()


def side_store() -> Any:
    """The second connection of this rank to the store, created at the first call for each process group."""
    global _side
    default = group_store()
    with _lock:
        if _side is None or _side[0] is not default:
            _side = default, default.clone()
        return _side[1]


def pause_of(ranks: int, seconds: float) -> float:
    """Seconds between two polls of a rank if ``ranks`` ranks poll: ``seconds``, or more if they are many."""
    return max(seconds, ranks / POLLS_PER_SECOND)


def poll(reached: Callable[[], bool], expired: Callable[[], bool], ranks: int = 1) -> bool:
    """Call ``reached`` until it returns True; returns False once ``expired`` does.

    Pauses grow from 1 to 100 ms, so what is there soon is seen soon. With many ranks they continue to grow, up to 0.5 s
    for 1,024 ranks and 2 s for 4,096.

    Args:
        reached: the condition.
        expired: whether the time limit has passed; called after ``reached`` returned False.
        ranks: how many ranks may poll at the same time.
    """
    pause, longest = _SHORTEST_PAUSE, pause_of(ranks, _LONGEST_PAUSE)
    while not reached():
        if expired():
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def _never() -> bool:
    return False


def expiry(seconds: float) -> Callable[[], bool]:
    """A function that returns True from ``seconds`` after this call on."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline


class RankStore:
    """Values under a prefix of the store.

    Every method raises RuntimeError or OSError if the process that holds the store is gone.

    Args:
        prefix: the same on all ranks, and used for nothing else.
        store: the connection; default: :func:`side_store`.
        ranks: how many ranks use it; default: the size of the process group.
    """

    def __init__(self, prefix: str, store: Any = None, ranks: int | None = None) -> None:
        self.prefix = prefix
        self.connection: Any = GuardedStore(side_store() if store is None else store)
        self._ranks = ranks if ranks is not None else dist.get_world_size() if dist.is_initialized() else 1

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def set(self, key: str, value: Any) -> None:
        """Write ``value``."""
        self.connection.set(self._key(key), json.dumps(value))

    def set_first(self, key: str, value: Any) -> bool:
        """Write ``value`` unless another rank was first; whether the stored value is now ``value``."""
        text = json.dumps(value)
        return bool(self.connection.compare_set(self._key(key), "", text).decode() == text)

    def check(self, *keys: str) -> bool:
        """Whether every key has a value."""
        return bool(self.connection.check([self._key(key) for key in keys]))

    def get(self, key: str) -> Any:
        """The value of ``key``; None if it has none."""
        return json.loads(self.connection.get(self._key(key))) if self.check(key) else None

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        """The values of ``keys``; None unless each of them has one."""
        return self._read(keys) if self.check(*keys) else None

    def _read(self, keys: Sequence[str]) -> list[Any]:
        values = self.connection.multi_get([self._key(key) for key in keys])
        return list(json.loads(b"[" + b",".join(values) + b"]"))  # parsed at once: there may be thousands

    def append(self, key: str, value: Any) -> None:
        """Add ``value`` to the list under ``key``."""
        self.connection.append(self._key(key), json.dumps(value) + "\n")

    def get_list(self, key: str) -> list[Any]:
        """All values that ranks have appended to ``key``; empty if there are none."""
        if not self.check(key):
            return []
        return [json.loads(line) for line in self.connection.get(self._key(key)).splitlines()]

    def add(self, key: str, amount: int = 1) -> int:
        """Increase the counter ``key``; returns its new value."""
        return int(self.connection.add(self._key(key), amount))

    def delete(self, *keys: str) -> None:
        """Remove the values of ``keys``."""
        for key in keys:
            self.connection.delete_key(self._key(key))

    def wait(self, key: str, expired: Callable[[], bool] = _never) -> Any:
        """The value of ``key``, as soon as a rank has written it.

        Raises:
            TimeoutError: there is none, and ``expired`` (see :func:`expiry`) returned True.
        """
        if not poll(lambda: self.check(key), expired, self._ranks):
            raise TimeoutError(f"no rank has written {self._key(key)} within the time limit")
        return json.loads(self.connection.get(self._key(key)))

    def wait_for_count(self, key: str, count: int, expired: Callable[[], bool] = _never) -> int:
        """The counter ``key``, once it has reached ``count`` or ``expired`` returns True."""
        value = 0

        def reached() -> bool:
            nonlocal value
            value = self.add(key, 0)
            return value >= count

        poll(reached, expired, self._ranks)
        return value

    def gather(self, key: str, value: Any, rank: int, expired: Callable[[], bool] = _never) -> list[Any] | None:
        """Every rank's ``value`` in rank order on rank 0; None elsewhere. Only rank 0 waits.

        Args:
            key: not used before.
            value: plain data; tuples become lists.
            rank: this rank.
            expired: ends the wait of rank 0 when it returns True.

        Raises:
            TimeoutError: on rank 0: not all ranks wrote their value.
        """
        if rank != 0:
            self.set(f"{key}/{rank}", value)
            self.add(f"{key}/count")
            return None
        others = self._ranks - 1
        if (count := self.wait_for_count(f"{key}/count", others, expired)) < others:
            raise TimeoutError(f"{count} of {others} other ranks have written {self._key(key)} within the time limit")
        # Each value was written before it was counted, so this does not wait.
        return [value, *(self._read([f"{key}/{number}" for number in range(1, self._ranks)]) if others else ())]


_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PREFIX = "ds_trainer/attempt"
_POLL_SECONDS = 0.01, 0.5  # first and longest pause
_OPERATIONS = 3  # of the store at each poll of a rank


def outlives_ranks(environment: Mapping[str, str]) -> bool:
    """Whether the store belongs to a launcher that may restart ranks."""
    return environment.get(_AGENT_STORE) == "True"


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """The store that the environment variables name, below a prefix of this attempt. Collective.

    Raises:
        TimeoutError: not all ranks arrived.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    name = agree_on_name(store, rank, world_size, timeout.total_seconds())
    return PrefixStore(f"{_PREFIX}/{name}", store)


def agree_on_name(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """A name that no earlier attempt in ``store`` has used. Collective.

    Raises:
        TimeoutError: not all ranks arrived within ``seconds``.
    """
    token = uuid.uuid4().hex
    store.set(f"{_PREFIX}/token/{rank}", token)
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
    longest = pause_of(_OPERATIONS * world_size, _POLL_SECONDS[1])
    name, tokens = "", list[str]()
    keys = [f"{_PREFIX}/token/{one}" for one in range(world_size)] if rank == 0 else []
    while time.monotonic() < deadline:
        if rank == 0 and store.check(keys):
            present = [value.decode() for value in store.multi_get(keys)]
            if present != tokens:
                tokens, given = present, uuid.uuid4().hex
                for other in tokens:
                    store.set(f"{_PREFIX}/name/{other}", given)
        if store.check([f"{_PREFIX}/name/{token}"]):
            given = store.get(f"{_PREFIX}/name/{token}").decode()
            if given != name:
                name = given
                store.add(f"{_PREFIX}/{name}/agreed", 1)
            if rank == 0 and store.add(f"{_PREFIX}/{name}/agreed", 0) == world_size:
                store.set(f"{_PREFIX}/{name}/confirmed", "")
            if store.check([f"{_PREFIX}/{name}/confirmed"]):
                return name
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    raise TimeoutError(f"rank {rank} of {world_size} waited {seconds:.0f} s for the other ranks")

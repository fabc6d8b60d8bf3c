"""Simulates one rank of many in one process, and counts its communication with the other ranks.

The process group is torch's fake group. Collectives return at once, as if all ranks had the same values: a gather
returns the value of this rank for every rank, and a sum is a multiple of it. The rendezvous store is a real TCP store
in this process, which returns the messages of this rank in place of those of other ranks. Values that must differ
between ranks (names of files) are changed to those of the other rank, and the files exist as links. So this rank runs
the same code as on a cluster, including all unpickling.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_STORE = ("set", "get", "add", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set", "append")
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("reduce", "barrier", "all_to_all_single", "gather", "scatter", "batch_isend_irecv"),
)


class Counts:
    """Counts of operations so far, by name."""

    def __init__(self) -> None:
        self._done: Counter[str] = Counter()
        self._aside = 0.0
        self.files_below: Path | None = None
        self.broadcasts: list[bytes] = []
        """The broadcasts of rank 0, in order; the other ranks receive them."""

    def add(self, name: str, number: int = 1) -> None:
        """Add ``number`` to the count of ``name``."""
        self._done[name] += number

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of work that other ranks would do; its time is not counted."""
        began = time.perf_counter()
        yield
        self._aside += time.perf_counter() - began

    def now(self) -> dict[str, float]:
        """All counts, with those of the operating system: descriptors, sockets, seconds, memory."""
        descriptors = _descriptors()
        found: dict[str, float] = dict(self._done)
        found["descriptors"] = len(descriptors)
        found["sockets"] = sum(name.startswith("socket:") for name in descriptors)
        found["seconds"] = time.perf_counter() - self._aside
        found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The counts between two readings."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


@contextmanager
def fake_world(ranks: int, counts: Counts, rank: int = 0) -> Iterator[None]:
    """Run this process as ``rank`` of ``ranks``, and add its operations to ``counts``.

    A rank other than 0 needs the ``counts.broadcasts`` of a rank 0 that has done the same.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
    )
    kept = _counted(counts, rank)
    try:
        dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
        if dist.is_initialized():
            dist.destroy_process_group()


def _counted(counts: Counts, rank: int) -> list[tuple[Any, str, Any]]:
    """Wrap all functions that communicate with other ranks in counters. Returns the original functions."""
    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        real = getattr(owner, name)
        kept.append((owner, name, real))
        setattr(owner, name, functools.wraps(real)(make(real)))

    def of_store(real: Any, name: str) -> Any:
        def call(store: Any, key: Any, *rest: Any) -> Any:
            counts.add("store_operations")
            counts.add("store_keys", len(key) if isinstance(key, list) else 1)
            if name in ("get", "check", "wait", "multi_get"):
                key = [_own(one, rank) for one in key] if isinstance(key, list) else _own(key, rank)
            answer = real(store, key, *rest)
            texts = [*rest, *(answer if isinstance(answer, list) else [answer])]
            counts.add("store_bytes", sum(len(text) for text in texts if isinstance(text, (str, bytes))))
            return answer

        return call

    for name in _STORE:
        replace(dist.Store, name, lambda real, name=name: of_store(real, name))

    def make_group(real: Any) -> Any:
        def call(size: int, place: Any, ranks: list[int], backend: Any, *rest: Any, **named: Any) -> Any:
            if ranks:  # not the default group
                counts.add("groups")
                counts.add("groups_of_others", int(rank not in ranks))
                counts.add("group_members", len(ranks))
            return real(size, place, ranks, "fake", *rest, **named)

        return call

    replace(dist.distributed_c10d, "_new_process_group_helper", make_group)

    def of_objects(real: Any) -> Any:
        def call(objects: list[Any], value: Any, *rest: Any, **named: Any) -> Any:
            counts.add("object_gathers")
            counts.add("objects", len(objects))
            counts.add("object_bytes", len(objects) * len(pickle.dumps(value)))
            return real(objects, value, *rest, **named)

        return call

    replace(dist, "all_gather_object", of_objects)

    def collective(real: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            counts.add("collectives")
            return real(*args, **named)

        return call

    for name in _COLLECTIVES:
        replace(dist, name, collective)

    def summed(real: Any) -> Any:
        def call(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            if op == dist.ReduceOp.SUM:  # of equal contributions
                tensor.mul_(dist.get_world_size(group))
            return real(tensor, op, group, async_op)

        return call

    replace(dist, "all_reduce", summed)

    def message(real: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            counts.add("messages")  # of votes, each after the one before
            return real(*args, **named)

        return call

    def received(real: Any) -> Any:
        def call(operations: list[Any]) -> Any:
            sent = [one.tensor for one in operations if one.op is dist.isend]
            for target, source in zip([one.tensor for one in operations if one.op is dist.irecv], sent, strict=True):
                target.copy_(source)
            return []

        return call

    def exchanged(real: Any) -> Any:
        def call(output: Any, given: Any, *rest: Any, **named: Any) -> Any:
            output.reshape(-1).copy_(given.reshape(-1))
            return real(output, given, *rest, **named)

        return call

    replace(dist, "batch_isend_irecv", received)
    replace(dist, "all_to_all_single", exchanged)

    from ds_trainer.checkpoint.background.store_barrier import StoreBarrier
    from ds_trainer.utils import distributed

    def gather(real: Any) -> Any:
        def call(value: Any) -> list[Any] | None:
            if rank:
                return None
            with counts.aside():
                others = [pickle.dumps(of_rank(value, other)) for other in range(1, dist.get_world_size())]
            counts.add("object_gathers")
            counts.add("objects", 1 + len(others))
            counts.add("object_bytes", sum(map(len, others)))
            return [value, *map(pickle.loads, others)]

        return call

    def meet(real: Any) -> Any:
        def call(meeting: Any, value: Any) -> Any:
            store = meeting._store
            turn = f"{store.prefix}/{meeting._turn + 1}"
            with counts.aside():
                for other in range(1, meeting.world_size):
                    real_set(store.connection, f"{turn}/{other}", json.dumps(of_rank(value, other)))
                real_add(store.connection, f"{turn}/count", meeting.world_size - 1)
            return real(meeting, value)

        return call

    real_set, real_add = (next(real for _, name, real in kept if name == wanted) for wanted in ("set", "add"))
    received_broadcasts = iter(list(counts.broadcasts))

    def broadcast(real: Any) -> Any:
        def call(value: Any) -> Any:
            if rank:
                return pickle.loads(next(received_broadcasts))
            counts.broadcasts.append(pickle.dumps(value))
            return value

        return call

    def made(real: Any) -> Any:
        def call(files: Any) -> Any:
            _sizes.update({file.name: file.size for file in files._files.values()})
            return real(files)

        return call

    from ds_trainer.checkpoint.protocol.shared_files import SharedFiles

    replace(SharedFiles, "create", made)

    def gather_objects(real: Any) -> Any:
        def call(value: Any) -> list[Any]:
            size = len(pickle.dumps(value))
            counts.add("object_gathers")
            counts.add("objects", dist.get_world_size())
            counts.add("object_bytes", dist.get_world_size() * size)
            return list(real(value))

        return call

    replace(distributed, "_swap", message)
    replace(distributed, "gather_objects", gather_objects)
    replace(distributed, "gather_to_main", gather)
    replace(distributed, "broadcast_object", broadcast)
    replace(distributed, "broadcast_from_main", broadcast)
    replace(StoreBarrier, "gather_to_main", meet)
    return kept


def _own(key: str, rank: int) -> str:
    """The key of this rank in place of the ``key`` of another rank."""
    return re.sub(r"/(windows/\d+|members|pulse)/\d+$", rf"/\1/{rank}", key)


_sizes: dict[str, int] = {}  # of the files that all ranks write together


def of_rank(value: Any, rank: int) -> Any:
    """The value that another rank would have sent: records of its own files, without those that only rank 0 writes."""
    from ds_trainer.checkpoint.protocol.file_records import FileRecord
    from ds_trainer.checkpoint.protocol.shared_files import SharedPart

    if type(value) is list and value and isinstance(value[0], SharedPart):  # one wrote the rest, which is zero
        return [SharedPart(part.name, _sizes[part.name] - part.written if rank == 1 else 0, 0) for part in value]
    if type(value) is list and value and isinstance(value[0], FileRecord):
        names = [name_of_rank(record.name, rank) for record in value]
        return [one._replace(name=name) for one, name in zip(value, names, strict=True) if name != one.name]
    return tuple(of_rank(one, rank) for one in value) if type(value) is tuple else value


def name_of_rank(name: str, rank: int) -> str:
    """The name of another rank's file in place of that of rank 0; the same name if only rank 0 writes the file."""
    name = re.sub(r"^(rank|extras|data)_0{5}", rf"\g<1>_{rank:05d}", name)
    return name.replace("random_state_rank0.", f"random_state_rank{rank}.")


def watch_files(counts: Counts) -> None:
    """From now on, count the files that are opened below ``counts.files_below``. This cannot be undone.

    Reports of slow steps are not counted: they depend on the load of the machine.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        below = counts.files_below
        if event != "open" or below is None or not isinstance(args[0], (str, Path)):
            return
        path = str(args[0])
        if path.startswith(str(below)) and not path.startswith(str(below / "health")):
            counts.add("files_opened")

    sys.addaudithook(hook)

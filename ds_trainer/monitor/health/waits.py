"""``WaitClock``: how long the training thread has waited in collectives, and which it waits in now.

Collectives of torch come back as a ``Work`` that somebody waits for: DeepSpeed, torch itself, or we. So one method
tells all, and is replaced while a training runs; it costs about a microsecond a collective. With gloo that is where a
rank waits for the others. With NCCL it is not: there the device waits, and the host only where it reads a number. So
what is measured here is about CPUs; what holds everywhere is how many collectives each group has begun
(:func:`counts`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch/csrc/distributed/c10d/Types.hpp: enum OpType.
_OPERATIONS = (
    *("broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_into_tensor"),
    *("all_gather_coalesced", "gather", "scatter", "reduce_scatter", "all_to_all_single", "all_to_all"),
    *("send", "recv", "recv from any", "barrier", "reduce_scatter_tensor"),
)


class WaitClock:
    """Counts the seconds that the thread which starts it waits for collectives.

    Attributes:
        seconds: waited in all.
        current: the ``Work`` that is waited for now, and since when; None while none is.
        last: the one that was waited for last, by name.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = 0
        self._replaced: Any = None
        self._own: Any = None
        self.seconds = 0.0
        self.current: tuple[Any, float] | None = None
        self._last: Any = None

    def start(self) -> None:
        """Begin to count, for this thread."""
        work: Any = dist.Work
        self._thread = threading.get_ident()
        original = self._replaced = work.wait
        clock, get_ident, thread = self._clock, threading.get_ident, self._thread

        def wait(self_: Any, *args: Any, **keywords: Any) -> Any:
            if get_ident() != thread:
                return original(self_, *args, **keywords)
            began = clock()
            self.current = (self_, began)
            try:
                return original(self_, *args, **keywords)
            finally:
                self.current = None
                self.seconds += clock() - began

        self._own = work.wait = wait

    def stop(self) -> None:
        """Leave ``Work`` as it was."""
        work: Any = dist.Work
        if self._own is not None and work.wait is self._own:
            work.wait = self._replaced
        self._own = None

    def waiting(self) -> tuple[str, float] | None:
        """Name of the collective that is waited for, and for how many seconds already."""
        current = self.current
        return None if current is None else (operation(current[0]), self._clock() - current[1])


def operation(work: Any) -> str:
    """The collective that ``work`` stands for, by name."""
    number = int(work._get_op_type())
    return _OPERATIONS[number] if 0 <= number < len(_OPERATIONS) else "collective"


def counts() -> dict[str, int]:
    """How many collectives this rank has begun in each process group that it belongs to, by the group's name.

    Groups that are not in use yet are left out. All ranks of a group number its collectives alike, so who has the
    smaller number is behind.
    """
    found: dict[str, int] = {}
    if dist.is_available() and dist.is_initialized():
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        for group in groups:
            try:
                number = int(group._get_sequence_number_for_group()) if dist.get_rank(group) >= 0 else 0
            except (RuntimeError, ValueError):  # its backend does not count, or it is being given up
                continue
            if number > 0:
                found[group.group_desc if group.group_desc != "undefined" else group.group_name] = number
    return found


def recorded(most: int = 20) -> list[str]:
    """The last collectives of torch's flight recorder, oldest first; empty where it is not on.

    NCCL's is on by default; gloo's with ``TORCH_FR_BUFFER_SIZE`` in the environment.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump()).get("entries", []) if dump is not None else []
    return [
        f"{entry.get('profiling_name')} number {entry.get('collective_seq_id')} of {' '.join(entry['process_group'])}: "
        f"{entry.get('state')}, {entry.get('input_sizes')} {entry.get('input_dtypes')}"
        for entry in entries[-most:]
    ]

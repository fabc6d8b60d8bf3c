"""``WaitClock``: how long the training thread has waited in collectives, and which one it waits in now.

torch's collectives return a ``Work`` object, on which DeepSpeed, torch or this package waits. ``Work.wait`` is replaced
while a training runs, at a cost of about a microsecond per collective. With gloo this is where a rank waits for the
others. With NCCL it is not: there the device waits, and the host only when it reads a number. So the measured time is
meaningful for gloo; the number of collectives that each group has started (:func:`collective_counts`) always is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.utils.errors import listed

# torch/csrc/distributed/c10d/Types.hpp: enum OpType.
_OPERATIONS = (
    *("broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_into_tensor"),
    *("all_gather_coalesced", "gather", "scatter", "reduce_scatter", "all_to_all_single", "all_to_all"),
    *("send", "recv", "recv from any", "barrier", "reduce_scatter_tensor"),
)


class WaitClock:
    """Counts the seconds that the calling thread of :meth:`start` waits for collectives.

    Attributes:
        seconds: total waiting time.
        current: the ``Work`` being waited for, and since when; None otherwise.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = 0
        self._original: Any = None
        self._replacement: Any = None
        self.seconds = 0.0
        self.current: tuple[Any, float] | None = None

    def start(self) -> None:
        """Start counting for this thread."""
        work: Any = dist.Work
        self._thread = threading.get_ident()
        original = self._original = work.wait
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

        self._replacement = work.wait = wait

    def stop(self) -> None:
        """Restore ``Work.wait``."""
        work: Any = dist.Work
        if self._replacement is not None and work.wait is self._replacement:
            work.wait = self._original
        self._replacement = None

    def waiting(self) -> tuple[str, float] | None:
        """Name of the current collective, and the seconds waited for it; None if there is none."""
        current = self.current
        return None if current is None else (operation(current[0]), self._clock() - current[1])


def operation(work: Any) -> str:
    """The name of the collective that ``work`` stands for."""
    number = int(work._get_op_type())
    return _OPERATIONS[number] if 0 <= number < len(_OPERATIONS) else "collective"


def collective_counts() -> dict[str, int]:
    """How many collectives this rank has started in each of its process groups, by the group's description and ranks.

    Unused groups are left out. All ranks of a group number its collectives equally, so the rank with the smaller number
    is behind.
    """
    counts: dict[str, int] = {}
    if dist.is_available() and dist.is_initialized():
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        for group in groups:
            try:
                number = int(group._get_sequence_number_for_group()) if dist.get_rank(group) >= 0 else 0
            except (RuntimeError, ValueError):  # its backend does not count, or it is being destroyed
                continue
            if number > 0:
                ranks = listed(dist.get_process_group_ranks(group), 8)  # groups of a mesh share their description
                counts[f"{group.group_desc} {group.group_name} of ranks {ranks}"] = number
    return counts


def flight_record(most: int = 20) -> list[str]:
    """The last collectives of torch's flight recorder, oldest first; empty if it is off.

    NCCL's is on by default; gloo's with ``TORCH_FR_BUFFER_SIZE`` in the environment.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump()).get("entries", []) if dump is not None else []
    return [
        f"{entry.get('profiling_name')} number {entry.get('collective_seq_id')} of {' '.join(entry['process_group'])}: "
        f"{entry.get('state')}, {entry.get('input_sizes')} {entry.get('input_dtypes')}"
        for entry in entries[-most:]
    ]

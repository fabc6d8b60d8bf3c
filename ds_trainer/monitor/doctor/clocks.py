"""How far the clocks of the machines are apart, measured by messages through the store of the process group.

A rank notes its time, asks the main process for its own, and notes its time again when the answer is there. The main
process's clock stood at its answer somewhere in between: the difference to the middle is the skew, half of the time in
between is how wrong that may be at most. The quickest of a few rounds counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_trainer.monitor.doctor.findings import Finding, Level, Place
from ds_trainer.utils import distributed

ROUNDS = 5
APART, FAR_APART = 1.0, 60.0  # seconds
_measured = itertools.count()


@dataclass(frozen=True)
class Skew:
    """A clock against the main process's: ``seconds`` ahead of it (negative: behind), give or take ``uncertainty``."""

    seconds: float
    uncertainty: float


def now() -> float:
    """This machine's clock, in seconds since 1970."""
    return time.time()


def measure_skews(asking: Sequence[int]) -> Skew | None:
    """The skew of this rank's clock. Collective: every rank calls it with the same ranks ``asking``.

    Returns:
        None on a rank that does not ask.
    """
    if distributed.world_size() == 1:
        return Skew(0.0, 0.0) if 0 in asking else None
    store: Any = dist.distributed_c10d._get_default_store()
    prefix, me = f"ds_trainer/clocks/{next(_measured)}", distributed.rank()
    if me == 0:
        for rank in asking:
            if rank != 0:
                _answer(store, f"{prefix}/{rank}")
        return Skew(0.0, 0.0) if 0 in asking else None
    return _ask(store, f"{prefix}/{me}") if me in asking else None


def _answer(store: Any, prefix: str) -> None:
    store.set(f"{prefix}/begin", "1")  # one rank after the other: nobody waits while the main process answers another
    for turn in range(ROUNDS):
        store.get(f"{prefix}/{turn}/asked")
        store.set(f"{prefix}/{turn}/answer", repr(now()))


def _ask(store: Any, prefix: str) -> Skew:
    store.get(f"{prefix}/begin")
    best = Skew(0.0, float("inf"))
    for turn in range(ROUNDS):
        before, began = now(), time.monotonic()
        store.set(f"{prefix}/{turn}/asked", "1")
        theirs = float(store.get(f"{prefix}/{turn}/answer"))
        half = (time.monotonic() - began) / 2
        if half < best.uncertainty:
            best = Skew(before + half - theirs, half)
    return best


def clock_finding(skews: Sequence[tuple[Place, Skew]]) -> Finding:
    """One finding for all machines."""
    if len(skews) < 2:
        return Finding(Level.OK, "clocks", "one machine")
    place, worst = max(skews, key=lambda one: abs(one[1].seconds) - one[1].uncertainty)
    apart = abs(worst.seconds) - worst.uncertainty
    direction, first = "ahead of" if worst.seconds > 0 else "behind", skews[0][0]
    said = f"{place.host} (rank {place.rank}) is {abs(worst.seconds):.3g} s {direction} {first.host}"
    said += f" (rank {first.rank}), give or take {worst.uncertainty:.2g} s"
    if apart <= APART:
        return Finding(Level.OK, "clocks", f"{len(skews)} machines; at worst {said}")
    remedy = "Start a time service on all machines (chronyd): time limits, locks and logs are compared across them."
    return Finding(Level.FAIL if apart > FAR_APART else Level.WARN, "clocks", said, remedy)

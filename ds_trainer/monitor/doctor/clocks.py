"""Clock skew between the machines, measured by messages through the store of the process group.

A rank reads its clock, asks the main process for its time, and reads its clock again when the answer arrives. The main
process answered somewhere in between. So the skew is the difference to the midpoint, and its uncertainty is half the
round trip. The fastest of a few round trips counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds_trainer.monitor.doctor.findings import Finding, Level, RankHost
from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit
from ds_trainer.utils.store import RankStore, expiry

ROUND_TRIPS = 5
WARN_SECONDS, FAIL_SECONDS = 1.0, 60.0
_measured = itertools.count()


@dataclass(frozen=True)
class Skew:
    """A clock relative to the main process's: ``seconds`` ahead of it (negative: behind), plus or minus
    ``uncertainty``.
    """

    seconds: float
    uncertainty: float


def now() -> float:
    """This machine's clock, in seconds since 1970."""
    return time.time()


def measure_skews(asking: Sequence[int]) -> Skew | None:
    """The skew of this rank's clock. Collective: every rank passes the same ranks ``asking``.

    Returns:
        None on ranks that are not in ``asking``.
    """
    if distributed.world_size() == 1:
        return Skew(0.0, 0.0) if 0 in asking else None
    prefix, me = f"ds_trainer/clocks/{next(_measured)}", distributed.rank()
    if me == 0:
        for rank in asking:
            if rank != 0:
                _answer(RankStore(f"{prefix}/{rank}", ranks=2))
        return Skew(0.0, 0.0) if 0 in asking else None
    return _ask(RankStore(f"{prefix}/{me}", ranks=2)) if me in asking else None


def _answer(store: RankStore) -> None:
    expired = expiry(collective_limit().total_seconds())
    store.set("begin", 1)  # one rank after the other: nobody waits while the main process answers another
    for turn in range(ROUND_TRIPS):
        store.wait(f"{turn}/asked", expired)
        store.set(f"{turn}/answer", now())


def _ask(store: RankStore) -> Skew:
    expired = expiry(collective_limit().total_seconds())
    store.wait("begin", expired)
    best = Skew(0.0, float("inf"))
    for turn in range(ROUND_TRIPS):
        before, began = now(), time.monotonic()
        store.set(f"{turn}/asked", 1)
        answer = float(store.wait(f"{turn}/answer", expired))
        half = (time.monotonic() - began) / 2
        if half < best.uncertainty:
            best = Skew(before + half - answer, half)
    return best


def clock_finding(skews: Sequence[tuple[RankHost, Skew]]) -> Finding:
    """One finding for all machines."""
    if len(skews) < 2:
        return Finding(Level.OK, "clocks", "one machine")
    rank, worst = max(skews, key=lambda one: abs(one[1].seconds) - one[1].uncertainty)
    difference = abs(worst.seconds) - worst.uncertainty
    direction, first = "ahead of" if worst.seconds > 0 else "behind", skews[0][0]
    message = f"{rank.host} (rank {rank.rank}) is {abs(worst.seconds):.3g} s {direction} {first.host}"
    message += f" (rank {first.rank}), +/- {worst.uncertainty:.2g} s"
    if difference <= WARN_SECONDS:
        return Finding(Level.OK, "clocks", f"{len(skews)} machines; largest skew: {message}")
    remedy = "Run a time service (chronyd) on all machines: time limits, locks and logs are compared across them."
    return Finding(Level.FAIL if difference > FAIL_SECONDS else Level.WARN, "clocks", message, remedy)

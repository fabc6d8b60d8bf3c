"""Who holds a hung job up: pure reasoning over what every rank says of itself.

In a hung job most ranks are victims: they wait in a collective for somebody who does not come. In this order:

1. A rank whose process does not answer at all (stopped, dead, its machine gone) is the one.
2. A rank that waits in no collective while others do is the one.
3. Where the host of every rank is elsewhere (with NCCL it is the device that waits), or all wait in collectives: the
   ranks that have begun fewer collectives than others of the same group, else those at an earlier step.
4. Else nobody is behind: the network or a device, or the data is slow for all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ds_trainer.monitor.health.stacks import place_of_user


@dataclass(frozen=True)
class RankReport:
    """What one rank says of itself.

    Attributes:
        rank, host, pid: who it is.
        step: optimizer steps done.
        phase, seconds: what its training thread is doing, and for how long.
        stalled: seconds since its last progress.
        waits_in, waits_for: collective that it waits in now, and for how many seconds; None: it does not.
        counts: collectives begun, by process group.
        stack: places of its training thread, innermost last.
        debugged: whether somebody looks at it in a debugger.
        ended: whether its training is over.
        silent: its process does not answer; the rest is what it said last, ``said_at`` by its wall clock.
        state: what the operating system says of a silent process, where somebody could ask.
    """

    rank: int
    host: str
    pid: int
    step: int = 0
    phase: str = ""
    seconds: float = 0.0
    stalled: float = 0.0
    waits_in: str | None = None
    waits_for: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    debugged: bool = False
    ended: bool = False
    silent: bool = False
    said_at: float = 0.0
    state: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data; ``RankReport(**data)`` is the way back."""
        return asdict(self)

    @property
    def name(self) -> str:
        """The rank, and where it runs."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def sentence(self) -> str:
        """What it is doing."""
        place = place_of_user(self.stack)
        where = f", at {place}" if place else ""
        if self.ended:
            return f"{self.name} has ended its training"
        if self.silent:
            why = self.state or "stopped, dead, or in a call that does not let Python go on"
            return f"{self.name} does not answer ({why}); last heard of after step {self.step} in {self.phase}{where}"
        if self.debugged:
            return f"{self.name} is in a debugger"
        if self.waits_in is not None:
            return f"{self.name} waits in {self.waits_in} for {self.waits_for:.1f} s, after step {self.step}"
        return f"{self.name} is in {self.phase} for {self.seconds:.1f} s, after step {self.step}{where}"


@dataclass(frozen=True)
class Verdict:
    """Who is to blame.

    Attributes:
        slow: the ranks that hold the others up; empty where nobody can be told apart.
        why: how that was found out.
    """

    slow: tuple[int, ...]
    why: str


def judge(reports: list[RankReport]) -> Verdict:
    """The ranks that the others wait for (see the head of this module)."""
    silent = [one.rank for one in reports if one.silent and not one.ended]
    if silent:
        return Verdict(tuple(silent), "its process does not answer" if len(silent) == 1 else "no answer")
    live = [one for one in reports if not one.ended]
    waiting = [one for one in live if one.waits_in is not None]
    free = [one.rank for one in live if one.waits_in is None]
    if waiting and free:
        return Verdict(tuple(free), "the others wait in a collective that it has not entered")
    if len(live) == 1:
        return Verdict((live[0].rank,), "there is no other")
    behind = _behind(live)
    if behind:
        return Verdict(tuple(behind), "it has begun fewer collectives than others of its group")
    first = min((one.step for one in live), default=0)
    late = [one.rank for one in live if one.step == first]
    if len(late) < len(live):
        return Verdict(tuple(late), "it has done fewer steps")
    return Verdict((), "all ranks stand at the same place")


def _behind(reports: list[RankReport]) -> list[int]:
    """Ranks that have begun fewer collectives than another one of the same group."""
    most: dict[str, int] = {}
    for one in reports:
        for group, number in one.counts.items():
            most[group] = max(most.get(group, 0), number)
    return [one.rank for one in reports if any(number < most[group] for group, number in one.counts.items())]

"""The ranks that a hung job waits for, derived from the reports of all ranks. Pure arithmetic.

In a hung job most ranks are victims: they wait in a collective for a rank that does not enter it. In this order, the
slow ranks are:

1. those whose process does not respond at all (stopped, dead, unreachable);
2. those that wait in no collective while others do;
3. none, if all wait in collectives, but a part of them in a callback or method of the script that the others are not
   in: the script has called on some ranks what needs all of them;
4. if no host waits (with NCCL the device waits) or all wait in collectives: those that have started fewer collectives
   than others of the same group, or else those at an earlier step;
5. otherwise none: the network, a device or the data is slow for all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.monitor.health.stacks import user_frame
from ds_trainer.monitor.health.waits import flight_record
from ds_trainer.utils.errors import listed
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.printable import shown


@dataclass(frozen=True)
class RankReport:
    """The state of one rank.

    Attributes:
        rank, host, pid: its identity.
        step: optimizer steps done.
        phase, seconds: what its training thread is doing, and for how long.
        seconds_since_progress: seconds since its last progress.
        collective, collective_seconds: the collective it waits in, and for how many seconds; None if it waits in none.
        counts: number of collectives started, by process group.
        stack: frames of its training thread, innermost last.
        debugged: whether it is stopped in a debugger.
        ended: whether its training is over.
        silent: whether its process does not respond; the other values are then those of its last report.
        reported_at: time of the report, by its wall clock.
        position: module and micro-batch, if it runs a module.
        script: callback or method of the script that it is in, and the line.
        state: state of a silent process according to the operating system, if known.
    """

    rank: int
    host: str
    pid: int
    step: int = 0
    phase: str = ""
    seconds: float = 0.0
    seconds_since_progress: float = 0.0
    collective: str | None = None
    collective_seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    debugged: bool = False
    ended: bool = False
    silent: bool = False
    reported_at: float = 0.0
    state: str = ""
    position: str = ""
    script: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data; ``RankReport(**data)`` restores it."""
        return asdict(self)

    @property
    def name(self) -> str:
        """The rank, its host and its process ID."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def activity(self) -> str:
        """What the rank is doing, in the words that ranks which do the same share."""
        if self.ended:
            return "finished"
        if self.silent:
            return f"silent, last in {self.position or self.phase}"
        if self.collective is not None:
            return f"waiting in {self.collective}{f' in {self.position}' if self.position else ''}"
        return f"in {self.position or self.phase}"

    def sentence(self) -> str:
        """What the rank is doing."""
        frame = user_frame(self.stack)
        where = f", at {frame}" if frame else ""
        if self.ended:
            return f"{self.name} has finished its training"
        if self.silent:
            why = self.state or "stopped, dead, or in a call that holds the GIL"
            return f"{self.name} does not respond ({why}); last report: {self.phase}, after step {self.step}{where}"
        if self.debugged:
            return f"{self.name} is in a debugger"
        if self.collective is not None:
            waiting = f"has been waiting in {self.collective} for {self.collective_seconds:.1f} s"
            return f"{self.name} {waiting}{f' in {self.script}' if self.script else ''}, after step {self.step}"
        return f"{self.name} has been in {self.phase} for {self.seconds:.1f} s, after step {self.step}{where}"


@dataclass(frozen=True)
class Verdict:
    """The slow ranks.

    Attributes:
        slow: the ranks that the others wait for; empty if none can be identified.
        why: the reason.
    """

    slow: tuple[int, ...]
    why: str


def judge(reports: list[RankReport]) -> Verdict:
    """The ranks that the others wait for, by the rules at the beginning of this module."""
    silent = [one.rank for one in reports if one.silent and not one.ended]
    if silent:
        return Verdict(
            tuple(silent), "its process does not respond" if len(silent) == 1 else "their processes do not respond"
        )
    live = [one for one in reports if not one.ended]
    waiting = [one for one in live if one.collective is not None]
    free = [one.rank for one in live if one.collective is None]
    if waiting and free:
        return Verdict(tuple(free), "the others wait in a collective that it has not entered")
    if len(live) == 1:
        return Verdict((live[0].rank,), "it is the only rank that is still training")
    if waiting and (alone := _alone(live)) is not None:
        return Verdict((), alone)
    behind = _behind(live)
    if behind:
        return Verdict(tuple(behind), "it has started fewer collectives than others of its group")
    first = min((one.step for one in live), default=0)
    late = [one.rank for one in live if one.step == first]
    if len(late) < len(live):
        return Verdict(tuple(late), "it has done fewer steps")
    return Verdict((), "all ranks are at the same step")


def joined(reports: list[RankReport], slow: Sequence[int]) -> str:
    """What all ranks do, as one sentence: the slow ones first, the largest group of the others last."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for one in reports:
        groups.setdefault((one.rank not in slow, one.activity()), []).append(one.rank)
    order = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1])))
    parts = []
    for index, ((_, activity), ranks) in enumerate(order):
        last = 0 < index == len(order) - 1
        verb = "is" if len(ranks) == 1 else "are"
        who = (
            f"the other {len(ranks)}" if last and len(ranks) > 1 else f"rank{'s'[: len(ranks) > 1]} {listed(ranks, 8)}"
        )
        parts.append(f"{who} {verb} {activity}")
    return "; ".join(parts)


def _alone(reports: list[RankReport]) -> str | None:
    """What some of the ranks, which all wait in collectives, have called in a script and the others have not."""
    calls: dict[str, list[RankReport]] = {}
    for one in reports:
        calls.setdefault(one.script.partition(" (")[0], []).append(one)
    found = next((group for name, group in calls.items() if name), None)
    if found is None or len(calls) == 1:
        return None
    ranks = listed((one.rank for one in found), 8)
    return (
        f"{found[0].script} waits in {found[0].collective} on rank{'s'[: len(found) > 1]} {ranks}, and the other ranks "
        "are not in it. Call what needs all ranks (a collective, gathered weights, a save, an evaluation) on all of "
        "them, without `if state.is_world_process_zero` or `if rank == 0` around it, and print or write on one"
    )


def _behind(reports: list[RankReport]) -> list[int]:
    """Ranks that have started fewer collectives than another rank of the same group."""
    most: dict[str, int] = {}
    for one in reports:
        for group, number in one.counts.items():
            most[group] = max(most.get(group, 0), number)
    return [one.rank for one in reports if any(number < most[group] for group, number in one.counts.items())]


REPORT = "report.txt"


def folder_for(directory: Path, step: int, suffix: str = "") -> Path:
    """A new folder below ``directory`` for a hang after ``step``. Folders of earlier hangs at this step are kept."""
    number, folder = 1, directory / f"hang-step-{step}{suffix}"
    while folder.exists():
        number += 1
        folder = directory / f"hang-step-{step}{suffix}-{number}"
    return folder


def write_rank(folder: Path, report: RankReport, stacks: str | None) -> Path:
    """Write the state of one rank to a file of its own.

    ``stacks`` are those of all its threads; None: only the last reported stack of its training thread is known.
    """
    lines = [report.sentence() + ".", ""]
    if stacks is None:
        reported = time.strftime("%H:%M:%S", time.localtime(report.reported_at))
        lines += [f"Its training thread at {reported}, in its last report:", *(f"  {frame}" for frame in report.stack)]
    else:
        lines.append(stacks)
        last = flight_record()
        if last:
            lines += ["", "Its last collectives (torch's flight recorder), oldest first:"]
            lines += [f"  {one}" for one in last]
    if report.counts:
        lines += ["", "Collectives that it has started, by process group:"]
        lines += [f"  {group}: {number}" for group, number in sorted(report.counts.items())]
    path = folder / f"rank_{report.rank}.txt"
    write_text_atomic(path, shown("\n".join(lines)) + "\n")
    return path


def summary(reports: list[RankReport], verdict: Verdict, reason: str) -> str:
    """The report as text: what happened, which ranks are slow, what all ranks do, the stacks of the slow ranks."""
    slow = [one for one in reports if one.rank in verdict.slow]
    others = [one for one in reports if one.rank not in verdict.slow]
    lines = [f"The job has stalled: {reason}."]
    if slow:
        lines.append(f"Slow: {', '.join(one.name for one in slow)}: {verdict.why}.")
    else:
        lines.append(f"No rank is behind: {verdict.why}.")
    lines.append(f"In short: {joined(reports, verdict.slow)}.")
    lines += [f"- {one.sentence()}" for one in (*slow, *others)]
    for one in slow:
        lines += ["", f"Stack of rank {one.rank}{' in its last report' if one.silent else ''}, innermost call last:"]
        lines += [f"  {frame}" for frame in one.stack]
    return "\n".join(lines)


def write_report(folder: Path, text: str) -> Path:
    """Write :func:`summary`."""
    path = folder / REPORT
    write_text_atomic(path, shown(text) + "\n")
    return path

"""What is left of a hang: a folder with a report, and the stacks of every rank that could still speak."""

from __future__ import annotations

import time
from pathlib import Path

from ds_trainer.monitor.health.verdict import RankReport, Verdict
from ds_trainer.monitor.health.waits import recorded
from ds_trainer.utils.files import write_text_atomic

REPORT = "report.txt"


def folder_for(directory: Path, step: int, more: str = "") -> Path:
    """A new folder below ``directory`` for a hang after ``step``; one of an earlier attempt at this step is kept."""
    number, found = 1, directory / f"hang-step-{step}{more}"
    while found.exists():
        number += 1
        found = directory / f"hang-step-{step}{more}-{number}"
    return found


def write_rank(folder: Path, report: RankReport, stacks: str | None) -> Path:
    """What one rank was doing, in a file of its own. ``stacks``: of all its threads; None: only what it said last."""
    lines = [report.sentence() + ".", ""]
    if stacks is None:
        lines += [
            f"Its training thread at {time.strftime('%H:%M:%S', time.localtime(report.said_at))}, when it spoke last:",
            *(f"  {place}" for place in report.stack),
        ]
    else:
        lines.append(stacks)
        last = recorded()
        if last:
            lines += ["", "Its last collectives (torch's flight recorder), oldest first:"]
            lines += [f"  {one}" for one in last]
    if report.counts:
        lines += ["", "Collectives that it has begun, by process group:"]
        lines += [f"  {group}: {number}" for group, number in sorted(report.counts.items())]
    path = folder / f"rank_{report.rank}.txt"
    write_text_atomic(path, "\n".join(lines) + "\n")
    return path


def summary(reports: list[RankReport], verdict: Verdict, reason: str) -> str:
    """The report as text: what happened, who is slow, what everybody does, the stack of the slow ones."""
    slow = [one for one in reports if one.rank in verdict.slow]
    others = [one for one in reports if one.rank not in verdict.slow]
    lines = [f"The job does not get on: {reason}."]
    if slow:
        lines.append(f"Slow: {', '.join(one.name for one in slow)}: {verdict.why}.")
    else:
        lines.append(f"No rank is behind: {verdict.why}.")
    lines += [f"- {one.sentence()}" for one in (*slow, *others)]
    for one in slow:
        lines += ["", f"Stack of rank {one.rank}{' when it spoke last' if one.silent else ''}, innermost call last:"]
        lines += [f"  {place}" for place in one.stack]
    return "\n".join(lines)


def write_report(folder: Path, text: str) -> Path:
    """Write :func:`summary`."""
    path = folder / REPORT
    write_text_atomic(path, text + "\n")
    return path

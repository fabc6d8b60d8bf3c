"""The report of a hang: a folder with a summary, and the stacks of every rank that responds."""

from __future__ import annotations

import time
from pathlib import Path

from ds_trainer.monitor.health.verdict import RankReport, Verdict, joined
from ds_trainer.monitor.health.waits import flight_record
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.printable import shown

REPORT = "report.txt"


def folder_for(directory: Path, step: int, suffix: str = "") -> Path:
    """A new folder below ``directory`` for a hang after ``step``. Folders of earlier hangs at this step are kept."""
    number, found = 1, directory / f"hang-step-{step}{suffix}"
    while found.exists():
        number += 1
        found = directory / f"hang-step-{step}{suffix}-{number}"
    return found


def write_rank(folder: Path, report: RankReport, stacks: str | None) -> Path:
    """Write the state of one rank to a file of its own.

    ``stacks`` are those of all its threads; None: only the last reported stack of its training thread is known.
    """
    lines = [report.sentence() + ".", ""]
    if stacks is None:
        reported = time.strftime("%H:%M:%S", time.localtime(report.reported_at))
        lines += [
            f"Its training thread at {reported}, in its last report:",
            *(f"  {frame}" for frame in report.stack),
        ]
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

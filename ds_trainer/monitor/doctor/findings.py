"""``Finding``: the result of one check, with a remedy; and the findings of many ranks as one table."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_trainer.utils.units import counted


class Level(enum.IntEnum):
    """Result of a check; larger is worse."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: FAIL if training cannot work, WARN if training may suffer.
        name: what was checked.
        message: the result, with numbers.
        remedy: what to do; empty if there is nothing to do.
    """

    level: Level
    name: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class RankHost:
    """A rank and the host it runs on."""

    rank: int
    host: str


@dataclass(frozen=True)
class GroupedFinding:
    """A finding and all ranks that share it."""

    finding: Finding
    ranks: tuple[RankHost, ...]


def grouped(by_rank: Iterable[tuple[RankHost, Sequence[Finding]]]) -> list[GroupedFinding]:
    """The findings of all ranks, each once, in the order of their first occurrence."""
    ranks: dict[Finding, list[RankHost]] = {}
    for rank, findings in by_rank:
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    order = {name: index for index, name in reversed(list(enumerate(finding.name for finding in ranks)))}
    ordered = sorted(ranks, key=lambda finding: order[finding.name])
    return [GroupedFinding(finding, tuple(ranks[finding])) for finding in ordered]


def exit_code(findings: Iterable[GroupedFinding]) -> int:
    """1 if any finding is a FAIL, else 0."""
    return int(any(one.finding.level == Level.FAIL for one in findings))


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def hosts_text(ranks: Sequence[RankHost], most: int = 4) -> str:
    """``ranks 0-3 (gpu1), rank 4 (gpu2)``."""
    hosts: dict[str, list[int]] = {}
    for one in ranks:
        hosts.setdefault(one.host, []).append(one.rank)
    parts = [f"{ranks_text(numbers)} ({host})" for host, numbers in list(hosts.items())[:most]]
    return ", ".join(parts) + (f" and {len(hosts) - most} more hosts" if len(hosts) > most else "")


def table(findings: Sequence[GroupedFinding], world_size: int) -> str:
    """Aligned lines: level, name, message and ranks; each remedy below its line; a summary at the end."""
    width = max((len(one.finding.name) for one in findings), default=0)
    lines = []
    for one in findings:
        finding = one.finding
        messages = {other.finding.message for other in findings if other.finding.name == finding.name}
        by = f"  [{hosts_text(one.ranks)}]" if world_size > 1 and len(messages) > 1 else ""
        lines.append(f"{finding.level.name:<4}  {finding.name:<{width}}  {finding.message}{by}")
        if finding.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
    counts = {level: sum(one.finding.level == level for one in findings) for level in Level}
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    bad = f"{counted(counts[Level.WARN], 'warning')}, {counted(counts[Level.FAIL], 'failure')}"
    lines.append(f"\n{ranks}: {counts[Level.OK]} ok, {bad}")
    return "\n".join(lines)


def as_json(findings: Sequence[GroupedFinding], world_size: int) -> dict[str, Any]:
    """The table as plain data."""
    rows = [
        {
            "level": one.finding.level.name,
            "name": one.finding.name,
            "message": one.finding.message,
            "remedy": one.finding.remedy,
            "ranks": [asdict(rank) for rank in one.ranks],
        }
        for one in findings
    ]
    return {"world_size": world_size, "exit_code": exit_code(findings), "findings": rows}

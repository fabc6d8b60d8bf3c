"""``Finding``: one thing that was looked at, how it is, and what to do; and findings of many ranks as one table."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Level(enum.IntEnum):
    """How it is; the larger, the worse."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: FAIL for what a training cannot work with, WARN for what may hurt it.
        name: what was looked at.
        said: how it is, with numbers.
        remedy: what to do; empty where all is well.
    """

    level: Level
    name: str
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Place:
    """Who found something."""

    rank: int
    host: str


@dataclass(frozen=True)
class Shared:
    """A finding and all who found it alike."""

    finding: Finding
    places: tuple[Place, ...]


def merged(found: Iterable[tuple[Place, Sequence[Finding]]]) -> list[Shared]:
    """Findings of all ranks, each once, in the order in which they were first made."""
    places: dict[Finding, list[Place]] = {}
    for place, findings in found:
        for finding in findings:
            places.setdefault(finding, []).append(place)
    order = {name: index for index, name in reversed(list(enumerate(finding.name for finding in places)))}
    ordered = sorted(places, key=lambda finding: order[finding.name])
    return [Shared(finding, tuple(places[finding])) for finding in ordered]


def exit_code(shared: Iterable[Shared]) -> int:
    """0 without a FAIL, else 1."""
    return int(any(one.finding.level == Level.FAIL for one in shared))


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


def places_text(places: Sequence[Place], most: int = 4) -> str:
    """``ranks 0-3 (gpu1), rank 4 (gpu2)``."""
    hosts: dict[str, list[int]] = {}
    for place in places:
        hosts.setdefault(place.host, []).append(place.rank)
    parts = [f"{ranks_text(ranks)} ({host})" for host, ranks in list(hosts.items())[:most]]
    return ", ".join(parts) + (f" and {len(hosts) - most} more hosts" if len(hosts) > most else "")


def table(shared: Sequence[Shared], world_size: int) -> str:
    """Aligned lines: level, name, what was found and by whom; remedies below their line; a summary at the end."""
    width = max((len(one.finding.name) for one in shared), default=0)
    lines = []
    for one in shared:
        finding = one.finding
        names: dict[str, list[Place]] = {}
        for other in shared:
            if other.finding.name == finding.name:
                names.setdefault(other.finding.said, []).extend(other.places)
        by = f"  [{places_text(one.places)}]" if world_size > 1 and len(names) > 1 else ""
        lines.append(f"{finding.level.name:<4}  {finding.name:<{width}}  {finding.said}{by}")
        if finding.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
    counts = {level: sum(one.finding.level == level for one in shared) for level in Level}
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    lines.append(f"\n{ranks}: {counts[Level.OK]} ok, {counts[Level.WARN]} warnings, {counts[Level.FAIL]} failures")
    return "\n".join(lines)


def as_json(shared: Sequence[Shared], world_size: int) -> dict[str, Any]:
    """The same as plain data."""
    findings = [
        {
            "level": one.finding.level.name,
            "name": one.finding.name,
            "said": one.finding.said,
            "remedy": one.finding.remedy,
            "places": [asdict(place) for place in one.places],
        }
        for one in shared
    ]
    return {"world_size": world_size, "exit_code": exit_code(shared), "findings": findings}

"""Findings of many ranks as one table, as JSON, and as an exit code."""

from __future__ import annotations

from ds_trainer.monitor.doctor.findings import (
    Finding,
    Level,
    RankHost,
    as_json,
    exit_code,
    grouped,
    hosts_text,
    ranks_text,
    table,
)

GOOD = Finding(Level.OK, "clocks", "together")
FULL = Finding(Level.FAIL, "disk", "no room", "Remove files.")
DISK_OK = Finding(Level.OK, "disk", "2 GiB free")


def test_equal_findings_are_reported_once_and_different_ones_side_by_side() -> None:
    found = grouped(
        [(RankHost(0, "a"), [DISK_OK, GOOD]), (RankHost(1, "a"), [DISK_OK, GOOD]), (RankHost(2, "b"), [FULL, GOOD])]
    )
    assert [(one.finding, [rank.rank for rank in one.ranks]) for one in found] == [
        (DISK_OK, [0, 1]),
        (FULL, [2]),
        (GOOD, [0, 1, 2]),
    ]
    assert table(found, 3).splitlines() == [
        "OK    disk    2 GiB free  [ranks 0-1 (a)]",
        "FAIL  disk    no room  [rank 2 (b)]",
        "              -> Remove files.",
        "OK    clocks  together",
        "",
        "3 ranks: 2 ok, 0 warnings, 1 failure",
    ]


def test_only_a_failure_sets_the_exit_code() -> None:
    assert exit_code(grouped([(RankHost(0, "a"), [GOOD, Finding(Level.WARN, "x", "y")])])) == 0
    assert exit_code(grouped([(RankHost(0, "a"), [GOOD, FULL])])) == 1


def test_json_contains_every_finding() -> None:
    (entry,) = as_json(grouped([(RankHost(1, "a"), [FULL])]), 2)["findings"]
    assert entry == {
        "level": "FAIL",
        "name": "disk",
        "message": "no room",
        "remedy": "Remove files.",
        "ranks": [{"rank": 1, "host": "a"}],
    }


def test_many_ranks_and_hosts_are_abbreviated() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 7, 9, 8]) == "ranks 0-2, 7-9"
    assert hosts_text([RankHost(rank, f"n{rank}") for rank in range(6)]).endswith("rank 3 (n3) and 2 more hosts")

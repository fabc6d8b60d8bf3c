"""Findings of many ranks as one table, as JSON, and as an exit code."""

from __future__ import annotations

from ds_trainer.monitor.doctor.findings import (
    Finding,
    Level,
    Place,
    as_json,
    exit_code,
    merged,
    places_text,
    ranks_text,
    table,
)

GOOD = Finding(Level.OK, "clocks", "together")
FULL = Finding(Level.FAIL, "disk", "no room", "Remove files.")
ROOMY = Finding(Level.OK, "disk", "2 GiB free")


def test_what_ranks_find_alike_is_said_once_and_what_differs_beside_each_other() -> None:
    found = merged([(Place(0, "a"), [ROOMY, GOOD]), (Place(1, "a"), [ROOMY, GOOD]), (Place(2, "b"), [FULL, GOOD])])
    assert [(one.finding, [place.rank for place in one.places]) for one in found] == [
        (ROOMY, [0, 1]),
        (FULL, [2]),
        (GOOD, [0, 1, 2]),
    ]
    assert table(found, 3).splitlines() == [
        "OK    disk    2 GiB free  [ranks 0-1 (a)]",
        "FAIL  disk    no room  [rank 2 (b)]",
        "              -> Remove files.",
        "OK    clocks  together",
        "",
        "3 ranks: 2 ok, 0 warnings, 1 failures",
    ]


def test_only_a_failure_is_an_exit_code() -> None:
    assert exit_code(merged([(Place(0, "a"), [GOOD, Finding(Level.WARN, "x", "y")])])) == 0
    assert exit_code(merged([(Place(0, "a"), [GOOD, FULL])])) == 1


def test_json_holds_all_of_it() -> None:
    (entry,) = as_json(merged([(Place(1, "a"), [FULL])]), 2)["findings"]
    assert entry == {
        "level": "FAIL",
        "name": "disk",
        "said": "no room",
        "remedy": "Remove files.",
        "places": [{"rank": 1, "host": "a"}],
    }


def test_many_ranks_and_hosts_stay_readable() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 7, 9, 8]) == "ranks 0-2, 7-9"
    assert places_text([Place(rank, f"n{rank}") for rank in range(6)]).endswith("rank 3 (n3) and 2 more hosts")

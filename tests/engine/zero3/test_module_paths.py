"""The tree of the ways that modules have been run in."""

from __future__ import annotations

import pytest

from ds_trainer.engine.zero3 import module_paths
from ds_trainer.engine.zero3.module_paths import ModulePaths


def walk(paths: ModulePaths, events: str, kind: str = "training") -> list[int]:
    """One pass; the places of it that were not known."""
    paths.begin(kind)
    asked = []
    for event in events:
        if not paths.follow(ord(event)):
            asked.append(paths.place)
            paths.take(ord(event))
    return asked


def test_a_known_way_is_followed() -> None:
    paths = ModulePaths()
    assert walk(paths, "abc") == [0, 1, 2]
    assert walk(paths, "abc") == []
    assert paths.place == 3


def test_where_ways_part_everybody_is_asked_each_time() -> None:
    paths = ModulePaths()
    walk(paths, "abcx")
    assert walk(paths, "abdx") == [2, 3]
    assert walk(paths, "abdx") == [2]
    assert walk(paths, "abcx") == [2]


def test_evaluations_have_a_tree_of_their_own() -> None:
    paths = ModulePaths()
    walk(paths, "abc")
    assert walk(paths, "ab", "evaluation") == [0, 1]
    assert walk(paths, "abc") == []


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_paths, "LONGEST", 5)
    paths = ModulePaths()
    walk(paths, "abc")
    walk(paths, "xyz")
    assert walk(paths, "abc") == [0, 1, 2]

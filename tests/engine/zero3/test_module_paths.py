"""The tree of the ways that modules have been run in."""

from __future__ import annotations

import pytest

from ds_trainer.engine.zero3 import module_guard
from ds_trainer.engine.zero3.module_guard import ModulePaths


def walk(paths: ModulePaths, events: str, kind: str = "training") -> list[int]:
    """One pass; returns the events that needed an agreement."""
    paths.begin(kind)
    queries = []
    for event in events:
        if paths.node.only == ord(event):
            paths.node = paths.node.then
        else:
            queries.append(paths.node.depth)
            paths.take(ord(event))
    return queries


def test_a_known_module_path_needs_no_agreement() -> None:
    paths = ModulePaths()
    assert walk(paths, "abc") == [0, 1, 2]
    assert walk(paths, "abc") == []
    assert paths.node.depth == 3


def test_at_a_branch_of_the_module_paths_ranks_agree_each_time() -> None:
    paths = ModulePaths()
    walk(paths, "abcx")
    assert walk(paths, "abdx") == [2, 3]
    assert walk(paths, "abdx") == [2]
    assert walk(paths, "abcx") == [2]


def test_evaluation_has_its_own_tree_of_module_paths() -> None:
    paths = ModulePaths()
    walk(paths, "abc")
    assert walk(paths, "ab", "evaluation") == [0, 1]
    assert walk(paths, "abc") == []


def test_the_stored_module_paths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_guard, "LONGEST", 5)
    paths = ModulePaths()
    walk(paths, "abc")
    walk(paths, "xyz")
    assert walk(paths, "abc") == [0, 1, 2]

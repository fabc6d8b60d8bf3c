"""The table of functions of other packages: each exists, each is known, and a change of one is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ds_trainer.engine import library_functions
from ds_trainer.engine.library_functions import (
    MISSING,
    LibraryRow,
    changed_functions,
    functions,
    installed_version,
    known_digests,
    library_rows,
    package_of,
    source_digest,
    source_files,
)

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED_STEP = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step"


def test_every_function_exists_in_some_version() -> None:
    """A misspelled name would be recorded as missing, and never change."""
    known = known_digests()
    assert sorted(known) == sorted(functions())
    assert [name for name, digests in known.items() if not set(digests) - {MISSING}] == []


def test_the_installed_functions_are_known() -> None:
    """If this fails after an update: run the tests, then tools/library_functions.py."""
    assert [str(change) for change in changed_functions()] == []


def test_every_row_names_a_file_of_the_package() -> None:
    assert [row.file for row in library_rows() if not (ROOT / "ds_trainer" / row.file).is_file()] == []
    assert all(row.replaces or row.relies_on for row in library_rows())


def imitation(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``imitated`` of version 1.0, in place of an installed one."""
    package = folder / "imitated"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text(source)
    information = folder / "imitated-1.0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: imitated\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder))
    installed_version.cache_clear()
    library_functions._parsed.cache_clear()
    library_functions.source_digest.cache_clear()


SOURCE = '''
import os
try:
    from os import path as where
except ImportError:
    where = None
LIMIT: int = 3

class Engine:
    """Text."""
    @property
    def step(self):
        """More text."""
        return 1  # a comment at the end stays

    def other(self):
        return 2
'''


def test_only_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"imitated.part:{name}" for name in ("Engine.step", "Engine", "LIMIT", "where")]

    def digests(source: str) -> list[str]:
        imitation(tmp_path, source, monkeypatch)
        return [source_digest(name) for name in names]

    first = digests(SOURCE)
    assert MISSING not in first and len(set(first)) == 4
    words = (
        SOURCE.replace("Text", "Words")
        .replace("More text", "Other words")
        .replace("    def other", "    # new\n\n    def other")
    )
    assert digests("# moved\n" + words) == first
    changed = digests(SOURCE.replace("return 1", "return 3"))
    assert [one == other for one, other in zip(changed, first, strict=True)] == [False, False, True, True]
    assert digests(SOURCE.replace("@property", "@staticmethod"))[0] != first[0]
    assert digests(SOURCE.replace("LIMIT: int = 3", "LIMIT: int = 4"))[2] != first[2]
    assert digests(SOURCE.replace("def step", "def step_"))[0] == MISSING
    assert source_digest("imitated.gone:step") == MISSING


def test_a_changed_and_a_missing_function_are_named_with_their_risk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitation(tmp_path, SOURCE, monkeypatch)
    row = LibraryRow(
        "engine/some.py", "weights are wrong", "self-test", ("imitated.part:Engine.step",), ("imitated.part:gone",)
    )
    known = {"imitated.part:Engine.step": {"0123456789ab": ["0.9"]}, "imitated.part:gone": {"0123456789ab": ["0.9"]}}
    monkeypatch.setattr(library_functions, "known_digests", lambda: known)
    changed, missing = map(str, changed_functions([row]))
    assert changed.startswith("imitated.part:Engine.step has changed in imitated 1.0 (tested with 0.9): engine/some.py")
    assert "weights are wrong" in changed and "gone does not exist in imitated 1.0" in missing
    known["imitated.part:Engine.step"][source_digest("imitated.part:Engine.step")] = ["1.0"]
    assert [change.function for change in changed_functions([row])] == ["imitated.part:gone"]


def test_a_package_that_is_not_installed_is_not_compared() -> None:
    assert changed_functions([LibraryRow("engine/some.py", "", "self-test", ("not_installed.part:function",))]) == []


def test_comparing_imports_no_package() -> None:
    """Of the table's packages, those that a run does not use are not imported for it."""
    tree = ast.parse(Path(library_functions.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported.isdisjoint({package_of(name) for name in functions()})
    assert len(source_files()) > 30

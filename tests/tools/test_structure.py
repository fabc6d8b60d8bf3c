"""The budget: figures that can be read off the files are below their ceilings; .ci/run measures those of runs, too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import structure
import yaml

CEILINGS = yaml.safe_load(structure.BUDGET.read_text(encoding="utf-8"))


def test_the_files_are_within_the_budget() -> None:
    """When this fails: make it smaller, or raise the ceiling in tools/budget.yaml in a commit that says what for."""
    size = structure.size()
    found = {
        "files": size["files"],
        "product lines": size["lines"],
        "functions": size["functions"],
        "own arguments": len(structure.own_arguments()),
        "positional calls": len(structure.positional_calls()),
        "test lines / product lines": structure.lines_of_tests() / size["lines"],
    }
    assert {name: value for name, value in found.items() if value > CEILINGS[name]["ceiling"]} == {}


# .ci/run prints the same figures and fails above a ceiling; those of files are held by the test above.
@pytest.mark.extended
def test_a_figure_above_its_ceiling_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of real runs, which are made once; the ceilings are others."""
    of_runs = {name: structure._in_new_process(name) for name in (structure.start, structure.toy_run)}
    assert 100 < of_runs[structure.toy_run]["files"] < of_runs[structure.toy_run]["functions"]
    assert of_runs[structure.start]["modules"] > 100 and of_runs[structure.start]["seconds"] > 0
    assert set(of_runs[structure.toy_run]["names"]) >= {"engine", "layout"}
    monkeypatch.setattr(structure, "_in_new_process", of_runs.get)
    monkeypatch.setattr(structure.walks, "step", lambda: [("a.py:f", 16), ("a.py:g", 16), ("b.py:h", 1)])
    monkeypatch.setattr(structure, "BUDGET", tmp_path / "budget.yaml")
    plenty = {name: {"ceiling": 10**9, "aim": 3} for name in CEILINGS}
    structure.BUDGET.write_text(yaml.safe_dump(plenty))
    assert structure.budget() == 0
    assert {line[:34].strip() for line in capsys.readouterr().out.splitlines()} == {*CEILINGS, "seconds of an import"}
    structure.BUDGET.write_text(yaml.safe_dump({**plenty, "functions of a micro-batch": {"ceiling": 1}}))
    assert structure.budget() == 1
    assert "above the ceiling: functions of a micro-batch." in capsys.readouterr().out
    structure.BUDGET.write_text(yaml.safe_dump({**plenty, "a new figure": {"ceiling": 1}}))
    with pytest.raises(RuntimeError, match="a new figure"):
        structure.budget()


def test_positional_calls_are_those_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    six, seven = "1, 2, 3, 4, 5, 6", "1, 2, 3, 4, 5, 6, 7"
    code = f"def f(*a): ...\nf({six})\nf({seven})\ntorch.op({seven})\nx.f(*a, {six})"
    monkeypatch.setattr(structure, "sources", lambda: [(structure.ROOT / "a.py", ast.parse(code))])
    assert structure.positional_calls() == ["a.py:3 f", "a.py:5 x.f"]

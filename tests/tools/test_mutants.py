"""The list of mutants: each can still be applied, and is reverted completely."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPICS = {
    *("loss", "clipping", "order", "sequence", "ring", "state", "protocol", "resume", "compiler", "rules", "votes"),
    *("secrets", "gathering", "recent", "policies"),
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_can_be_applied() -> None:
    """A text that the code no longer has would count as noticed, or as nothing at all."""
    command = [sys.executable, str(ROOT / "tools" / "mutants.py"), "--check-anchors"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "0 of them cannot be made" in completed.stdout


def test_the_list_is_long_and_covers_every_topic(tool: ModuleType) -> None:
    topics = Counter(mutant.topic for mutant in tool.load())
    assert set(topics) == TOPICS and min(topics.values()) >= 10
    assert sum(topics.values()) >= 150


def mutant(tool: ModuleType, **changes: str) -> object:
    values = {"topic": "t", "name": "n", "file": "ds_trainer/utils/errors.py", "tests": "tests/utils"}
    return tool.Mutant(**{**values, "old": "class ConfigError", "new": "class Other", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"old": "class ConfigErrors("}, "is 0 times in ds_trainer/utils/errors.py; the nearest line: class ConfigErr"),
        ({"old": "e"}, "times in ds_trainer/utils/errors.py"),
        ({"file": "ds_trainer/gone.py"}, "there is no ds_trainer/gone.py"),
        ({"new": "class ConfigError"}, "it changes nothing"),
        ({"tests": "tests/gone.py::test_x -k y"}, "there is no tests/gone.py::test_x"),
    ],
    ids=str,
)
def test_impossible_mutants_are_reported(tool: ModuleType, changes: dict[str, str], message: str) -> None:
    problem = mutant(tool, **changes).problem()  # type: ignore[attr-defined]
    assert message in problem and bool(message) == bool(problem)


def test_a_mutant_is_reverted(tool: ModuleType, tmp_path: Path) -> None:
    """With the time of the file, so that no compiled module is taken for that of the mistake, or the other way."""
    path = tmp_path / "code.py"
    path.write_text("one = 1\n")
    before = path.stat().st_mtime_ns
    with tool.made(mutant(tool, file="code.py", old="= 1", new="= 2"), tmp_path):
        assert path.read_text() == "one = 2\n" and path.stat().st_mtime_ns > before
    assert path.read_text() == "one = 1\n" and path.stat().st_mtime_ns == before


def test_the_share_of_noticed_mutants_decides_the_exit_code(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(*verdicts: str) -> int:
        return int(tool.report([tool.Result(mutant(tool), verdict, 1.0) for verdict in verdicts]))

    assert code(*["noticed"] * 18, "noticed: it hangs", "not noticed") == 0
    assert "95.0%" in capsys.readouterr().out
    assert code(*["noticed"] * 9, "not noticed") == 1
    assert code(*["noticed"] * 99, "the tests fail without it") == 2

"""Markers at the tests say which cases run by default, in the extended run and with ``-m matrix``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def test_the_test_itself_says_whether_it_runs() -> None:
    gone = [
        name for name in ("seconds.json", "extended.py", "matrix.py") if (ROOT / "tests" / "support" / name).exists()
    ]
    assert not gone, (
        f"tests/support/{gone[0]} decides nothing: mark the test itself, extended or cases(2), and remove it."
    )


def test_what_starts_jobs_is_extended() -> None:
    """Nobody waits for machines, launchers and scripts in the default run."""
    files = [
        path for name in ("cluster", "resilience", "examples", "benchmarks") for path in TESTS.glob(f"{name}/test_*.py")
    ]
    unmarked = [
        str(path) for path in files if not re.search(r"^pytestmark = .*(extended|matrix)", path.read_text(), re.M)
    ]
    assert len(files) > 20 and not unmarked, f"{unmarked}: begin with pytestmark = pytest.mark.extended."


def test_what_replaces_a_case_exists() -> None:
    comments = [
        text
        for path in TESTS.rglob("test_*.py")
        for text in re.findall(r"# Instead(.*\n(?:# .*\n)*)", path.read_text())
    ]
    paths = [path for text in comments for path in re.findall(r"tests/[\w/]+(?:\.py)?", text)]
    assert len(paths) > 15 and [path for path in paths if not (ROOT / path).exists()] == []


CHOSEN = """
import pytest

@pytest.mark.cases(1, "named", rest="extended")
@pytest.mark.parametrize("case", ["first", "other", "named", "last"])
def test_some(case): ...

@pytest.mark.cases(1)
@pytest.mark.extended
@pytest.mark.parametrize("case", ["first", "other"])
def test_slow(case): ...

@pytest.mark.needs("no-such-program")
def test_more(): ...

@pytest.mark.cases("b")
@pytest.mark.parametrize("case", ["a", "b"])
def test_plain(case): ...

@pytest.mark.cases(2)
@pytest.mark.parametrize("case", range(5))
def test_even(case): ...
"""


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("", ["test_some[first]", "test_some[named]", "test_plain[b]", "test_even[0]", "test_even[3]"]),
        ("extended", ["test_some[other]", "test_some[last]", "test_slow[first]", "test_more"]),
        ("matrix", ["test_slow[other]", "test_plain[a]", "test_even[1]", "test_even[2]", "test_even[4]"]),
    ],
)
def test_markers_say_what_runs(expression: str, found: list[str], tmp_path: Path) -> None:
    """With the rules of this suite, on a file of its own."""
    done = collected(CHOSEN, tmp_path, "-m", expression)
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert names == found, done.stdout + done.stderr


def test_a_marker_that_names_no_case_is_an_error(tmp_path: Path) -> None:
    done = collected(CHOSEN.replace('"named", "last"', '"renamed", "last"'), tmp_path)
    assert done.returncode != 0 and "test_some: its marker names the case 'named'; it has none." in done.stderr


def collected(text: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_chosen.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--collect-only", "-q"]
    command += ["-c", str(ROOT / "setup.cfg"), "-o", "addopts=", "--rootdir", str(directory), *options, str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

"""docs/architecture.md against the code: the walks are those of a real run, and the folders exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    begin = PAGE.index(f"\n### {title}\n")
    return PAGE[begin : begin + 5 + re.search(r"\n##", PAGE[begin + 5 :]).start()]  # type: ignore[union-attr]


def listed(title: str) -> list[str]:
    return [line for block in re.findall(r"```text\n(.*?)```", section(title), re.DOTALL) for line in block.split()]


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    """As a process of its own shows them: nothing of other tests is loaded or patched."""
    code = "import json, sys; sys.path.insert(0, 'tools'); import walks\n"
    code += "print(json.dumps({name: walk() for name, walk in walks.WALKS.items()}))"
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know the class of a function")
@pytest.mark.parametrize(("title", "name"), [("A batch", "batch"), ("An argument", "argument"), ("A save", "save")])
def test_the_documented_walks_are_those_of_a_run(title: str, name: str, walks: dict[str, list[str]]) -> None:
    assert listed(title) == walks[name]


def test_a_micro_batch_passes_through_few_functions() -> None:
    """The page says how many; the limits are those of the review that asked for one page."""
    names = listed("A batch")
    files = {name.partition(":")[0] for name in names}
    assert f"{len(names)} functions in {len(files)} files" in section("A batch")
    assert len(names) <= 35 and len(files) <= 12


def test_every_folder_is_described_in_the_order_of_imports() -> None:
    """The contract of setup.cfg lists the folders from the top."""
    contract = (ROOT / "setup.cfg").read_text(encoding="utf-8").partition("[importlinter:contract:layers]")[2]
    layers = contract.partition("layers =\n")[2].partition("exhaustive")[0].split()
    assert re.findall(r"^\| `(\w+)/` \|", PAGE.partition("Inside `training/`")[0], re.MULTILINE) == layers[::-1]


def test_paths_exist() -> None:
    named = set(re.findall(r"[\w/]+\.py\b", PAGE))
    assert len(named) > 50
    files = [str(path) for folder in ("ds_trainer", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files)] == []


@pytest.mark.extended
def test_components_own_their_state() -> None:
    """Rule 9: no attribute of the Trainer has writers in two files, no private method is called from another file."""
    sys.path.insert(0, str(ROOT / "tools"))
    import structure

    assert structure.trainer()["attributes with several writers"] == 0
    assert structure.private_calls() == []

"""The README's first screen is true: its code runs as it stands and prints what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import ROOT, environment, losses

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The first block of code in this language."""
    found = re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    return found[1]


def masked(line: str) -> str:
    """A line of output whose numbers and spaces do not matter: text and speed differ between machines and Pythons."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*(e[+-]\d+)?", "#", line)).strip()


def test_the_readme_is_short() -> None:
    prose = re.sub(r"```.*?```", "", README.partition("\n[install]: ")[0], flags=re.DOTALL)
    assert len(prose.split()) < 450
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 12


def test_the_home_page_shows_the_same() -> None:
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert block("python") in home and block("text") in home


@pytest.mark.slow
def test_the_code_prints_the_output(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python"), encoding="utf-8")
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py"],
        cwd=tmp_path,
        env=environment() | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    printed = [masked(line) for line in (completed.stdout + completed.stderr).splitlines()]
    for line in block("text").splitlines():
        start = masked(line.removesuffix("..."))
        assert any(other.startswith(start) for other in printed), (
            f"{line!r} is not in:\n{completed.stdout}{completed.stderr}"
        )
    found = losses(tmp_path / "runs" / "tiny")
    shown = [float(loss) for loss in re.findall(r"  loss ([\d.]+)", block("text"))]
    assert found == pytest.approx(shown, abs=0.3)

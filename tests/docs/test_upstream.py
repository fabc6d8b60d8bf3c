"""The reproducers of docs/upstream run, with the project concerned alone, and still show what the texts say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "upstream"


def reproducers(pages: str = "*.md") -> dict[str, str]:
    """The code of every section that has some, by its title."""
    found = {}
    for page in sorted(FOLDER.glob(pages)):
        for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
            if code is not None:
                found[section.partition("\n")[0]] = code[1]
    return found


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


WRONG = reproducers("deepspeed.md")  # wrong results and errors: CI sees when a new DeepSpeed has mended one


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=pytest.mark.extended if title in WRONG else pytest.mark.matrix)
        for title in reproducers()
    ],
)
def test_an_issue_still_reproduces(title: str) -> None:
    """If it is fixed in the installed version: delete the patch, its row and the text."""
    code = reproducers()[title]
    assert "ds_trainer" not in code
    ranks = int((re.match(r"# ranks: (\d+)\n", code) or ["", "1"])[1])
    needs = re.match(r"# needs: (\w+)\n", code)  # a flag of the processor
    if needs and needs[1] not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip(f"this machine has no {needs[1]}")
    port = free_port()
    left_out = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    common = {name: value for name, value in os.environ.items() if name not in left_out}
    common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert any(line.startswith("reproduced") for line in output.splitlines()), output

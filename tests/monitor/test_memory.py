"""Memory figures follow what is really allocated."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ds_trainer
from ds_trainer.monitor.memory import BYTES_PER_GB, memory_in_use_gb


def test_on_a_cpu_memory_is_the_resident_set() -> None:
    before = memory_in_use_gb("cpu")
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])  # only touched pages are resident
    grown = memory_in_use_gb("cpu") - before
    del block
    assert grown == pytest.approx(200 * 2**20 / BYTES_PER_GB, rel=0.2)


def test_a_torch_device_and_its_name_give_the_same_memory() -> None:
    import torch

    assert memory_in_use_gb(torch.device("cpu")) == pytest.approx(memory_in_use_gb("cpu"), rel=0.05)


def test_the_cpu_needs_no_torch() -> None:
    code = (
        "import sys; from ds_trainer.monitor.memory import memory_in_use_gb;"
        "assert memory_in_use_gb('cpu') > 0; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.gpu
def test_on_a_gpu_memory_is_the_peak() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    torch.cuda.reset_peak_memory_stats()
    before = memory_in_use_gb("cuda")
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda:0")
    del block
    assert memory_in_use_gb(torch.device("cuda", 0)) - before == pytest.approx(256 * 2**20 / BYTES_PER_GB, rel=0.05)


def test_messages_have_one_unit_of_memory() -> None:
    """GB of 10**9 bytes; only the limits of what is read are powers of two."""
    found = set()
    for path in Path(ds_trainer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else ()
            text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            binary = isinstance(node, ast.BinOp) and ast.unparse(node).endswith("/ 2 ** 30")
            if re.search(r"\b[KMGT]iB\b", text) or binary:
                found.add(path.name)
    assert found == {"rows.py", "files.py"}

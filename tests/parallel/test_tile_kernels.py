"""Triton's kernels for tiles of logits: interpreted where Triton is installed, compiled where there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_trainer.parallel.linear_cross_entropy import tile_sizes

ALLOWED = {"torch.float32": 1e-6, "torch.bfloat16": 5e-3}
SCRIPT = Path(__file__).with_name("tile_kernel_cases.py")


def test_tiles_of_gpus_are_large_enough() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert tile_sizes(None, cpu) == (1024, 4096)
    assert tile_sizes(100, cpu) == (100, 4096)
    assert tile_sizes(None, gpu) == (4096, 4096)
    assert tile_sizes(512, gpu) == (512, 2**15)
    assert tile_sizes(10**6, gpu) == (10**6, 4096)


def test_interpreted_kernels_give_the_same() -> None:
    pytest.importorskip("triton")
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=variables, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found[dtype] < allowed for dtype, allowed in ALLOWED.items()), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_kernels_give_the_same() -> None:
    from tests.parallel.tile_kernel_cases import largest_difference

    found = largest_difference("cuda")
    assert all(found[dtype] < allowed for dtype, allowed in ALLOWED.items()), found

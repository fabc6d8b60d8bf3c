"""The benchmark of checkpoint formats: both formats resume with the losses of the uninterrupted run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they are scripts, not a package

import checkpoint_formats as benchmark

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


# Instead: tests/checkpoint/shards/test_layouts.py, tests/checkpoint/weights/test_model_files.py: both ways are exact
@pytest.mark.matrix
def test_both_formats_are_exact_and_one_writes_less() -> None:
    result = benchmark.measure("ZeRO-1 x2 -> ZeRO-1 x1", (64, 2))
    assert result["ours"]["difference"] == pytest.approx(0, abs=1e-6)
    assert result["universal"]["difference"] == pytest.approx(0, abs=1e-6)
    assert result["first"]["bytes ours"] < result["first"]["bytes plain"] + result["first"]["bytes universal"]
    assert "ZeRO-1 x2 -> ZeRO-1 x1, universal" in benchmark.table([result])

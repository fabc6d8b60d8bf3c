"""The benchmark of loading: all ways give the same weights, and the bytes are those that the ways must ask for."""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they are scripts, not a package

import loading as benchmark

from ds_trainer.checkpoint.weights.strided_views import StridedView

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_the_bytes_read_by_each_loading_mode(tmp_path: Path) -> None:
    setting = benchmark.Setting(ranks=2, tensor_bytes=2**18, tensors=4, files=2, rounds=1)
    result = benchmark.measure(setting, tmp_path)
    assert result["same"]
    assert result["file_bytes"] == 4 * 2**18
    requested = {(case["a rank holds"], case["way"]): case["requested"] for case in result["cases"]}
    for need in benchmark.NEEDS:
        assert [requested[need, way] for way in benchmark.WAYS] == [1, 1, 2]
    assert len(result["cases"]) == 12
    assert "| local | shards | own ranges |" in benchmark.table(result, setting)


def test_the_slow_disk_is_shared_by_all_ranks(tmp_path: Path) -> None:
    free_at = get_context("fork").Value("d", 0.0)
    setting = benchmark.Setting(tensor_bytes=100 * 1024, tensors=2, files=1)
    file_bytes = benchmark.write_model(tmp_path, setting)
    stored = benchmark.stored_tensors(tmp_path)
    started = time.monotonic()
    for tensor in stored.values():  # a reader of its own for each
        reader = benchmark.SlowReader(free_at, rate=1e6)
        target = torch.empty(tensor.numel, dtype=tensor.dtype)
        view = StridedView((tensor.numel,), (1,))
        reader.read([(tensor, view, view)], target)
    assert file_bytes / 1e6 <= time.monotonic() - started

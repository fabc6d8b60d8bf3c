"""A rank's load does not grow with the number of ranks: fewer bytes, no more files, reads, messages or memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import loading_scale as benchmark  # noqa: E402

# Instead: tests/checkpoint/loading/test_verification_cost.py: how many reads a load makes, and of how many bytes
pytestmark = pytest.mark.matrix

RANKS = (64, 512)
Figures = dict[tuple[int, int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Counts by ranks, tensor parallelism and rank."""
    folder = tmp_path_factory.mktemp("files")
    tiny, files = benchmark.write("tiny", folder), benchmark.write("small", folder)
    figures = {}
    for tp in (1, 8):
        for ranks in RANKS:
            messages: list[bytes] = []
            for rank in (0, ranks // 2 + tp // 2):
                line = benchmark.Line("small", ranks, tp, rank)
                figures[ranks, tp, int(rank > 0)] = benchmark.measure(line, files, tiny, messages)
    return figures


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("middle", [0, 1])
def test_more_ranks_read_fewer_bytes_each_without_more_calls(found: Figures, tp: int, middle: int) -> None:
    few, many = (found[ranks, tp, middle] for ranks in RANKS)
    assert many["opened"] <= few["opened"]
    assert many["reads"] <= 1.5 * few["reads"]  # where a range begins decides what is read along
    assert many["collectives"] <= few["collectives"] + 6  # votes follow the clock
    assert many["objects"] - few["objects"] <= RANKS[1] - RANKS[0]  # what rank 0 receives, once
    assert many["asked"] < few["asked"]


@pytest.mark.parametrize("tp", [1, 8])
def test_all_ranks_together_read_the_file_once(found: Figures, tp: int) -> None:
    for (ranks, tp_size, _), one in found.items():
        if tp_size == tp:
            assert one["whole"] == 0
            sizes = benchmark.MODELS["small"]
            embedding = (
                sizes["vocab_size"] * sizes["hidden_size"] * 2
            )  # not partitioned: each tensor-parallel rank has all of it
            uncut = (tp - 1) * embedding
            assert one["shards"] * ranks <= 1.1 * (one["file_bytes"] + uncut)


def test_divided_experts_are_read_once(tmp_path: Path) -> None:
    """Each rank reads its shard, from a file entry for each matrix of an expert."""
    files = benchmark.write("tiny experts", tmp_path)
    one = benchmark.measure(benchmark.Line("tiny experts", 8, 1, 0, ep=8), files, files, [])
    assert one["whole"] == 0 and 0.9 * one["file_bytes"] < 8 * one["shards"] < 1.1 * one["file_bytes"]

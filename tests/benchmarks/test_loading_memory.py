"""Until its first step a rank takes hardly more memory than it then holds, and the ranks read the files once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import loading_memory as benchmark  # noqa: E402
from weight_files import write_random  # noqa: E402

# Instead: tests/engine/loading/test_creation_memory.py: a load takes no memory beside the shards
pytestmark = pytest.mark.matrix

MODEL = benchmark.SMALL


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Figures of two ranks at ZeRO-3, by the way of loading."""
    directory = tmp_path_factory.mktemp("model")
    write_random(MODEL.config(), directory, MODEL.file_bytes)
    return {way: benchmark.measure(benchmark.Case(way, 2, 3), directory) for way in benchmark.WAYS}


@pytest.mark.parametrize("way", [benchmark.THEIRS, benchmark.OURS, benchmark.PATH])
def test_a_load_takes_no_memory_besides_the_shards(found: dict[str, dict[str, Any]], way: str) -> None:
    figures = found[way]
    # What does not grow with the model: fragments of the heap, and a parameter that is on its way. The buffer of the
    # files' reader is not used: shards of the files' own type are read straight to their places.
    assert figures["peak"] <= 1.10 * figures["holds"] + 16 * 2**20
    assert figures["load_peak"] <= 1.10 * figures["file_bytes"] / 2 + 16 * 2**20
    assert figures["whole"] == 0
    assert figures["parameters"] == 9 * MODEL.layers + 3
    assert figures["read"] <= 1.2 and (figures["read"] >= 0.99) == (way != benchmark.THEIRS)
    assert figures["loss"] == found[benchmark.THEIRS]["loss"]
    # Shards, masters, gradients: 8 bytes a parameter over two ranks.
    assert figures["holds"] == pytest.approx(4 * figures["file_bytes"] / 2, rel=0.1)


def test_control_a_full_model_on_every_rank_is_detected(found: dict[str, dict[str, Any]]) -> None:
    assert found[benchmark.COPIED]["load_peak"] >= 0.95 * found[benchmark.COPIED]["file_bytes"]


def test_the_table_has_a_line_for_each_mode(found: dict[str, dict[str, Any]]) -> None:
    table = benchmark.table(list(found.values())).splitlines()
    assert len(table) == 2 + len(found)
    assert all(way in line for way, line in zip(found, table[2:], strict=True))

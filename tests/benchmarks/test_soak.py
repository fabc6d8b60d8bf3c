"""A short soak: nothing grows from step to step, and what is made to grow is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import soak as benchmark  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


# Instead: tests/training/test_layout_memory.py, tests/checkpoint/shards/test_opened_files.py: memory and open files
# of a run
@pytest.mark.matrix
@pytest.mark.slow
def test_only_deliberate_leaks_grow() -> None:
    result = benchmark.soak(1, benchmark.QUICK_STEPS)
    # Of a run of seconds on a busy machine CPU time says nothing: it is judged by the benchmark itself alone.
    assert [line for line in result["grows"] if "CPU time" not in line] == []
    assert result["left_in_shm"] == []
    assert result["moments"]["100%"]["tensors"] > 100, "they are counted"
    assert result["slopes"]["log_mb"] > 0, "a record a log: by design"
    leaking = benchmark.soak(1, benchmark.QUICK_STEPS, leak=True)
    assert any("memory" in line for line in leaking["grows"])
    assert any("live tensors" in line for line in leaking["grows"])
    kept = leaking["slopes"]["rss_mb"] - result["slopes"]["rss_mb"]
    assert kept == pytest.approx(1e4 * benchmark.LEAK_BYTES / 1e6, rel=0.3)


def samples(values: list[float]) -> list[dict[str, float]]:
    return [{**dict.fromkeys(benchmark.TITLES, value), "step": 100.0 * index} for index, value in enumerate(values)]


def test_growth_is_measured_over_all_ranks_after_startup() -> None:
    rising = [1e3 * index for index in range(21)] + [2e4 + 0.01 * index for index in range(180)]
    found = benchmark.summary([samples(rising), samples(rising)], benchmark.STEPS)
    assert found["slopes"]["rss_mb"] == pytest.approx(2.0, rel=0.05), "0.01 each 100 steps, of two ranks"
    assert found["slopes"]["disk_mb"] == pytest.approx(1.0, rel=0.05), "which the ranks share"
    assert len(found["grows"]) == 4, "memory is as much as the logs take, and the others may grow more than this"
    assert not any("memory" in line for line in found["grows"])

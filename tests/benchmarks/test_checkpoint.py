"""The benchmark of checkpoints measures real ones: ours hold what they should, others' are written at all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import checkpoint as benchmark  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_every_save_mode_writes_its_bytes(tmp_path: Path) -> None:
    case = replace(benchmark.CASES["cpu"][0], hidden=64, layers=2, vocabulary=512, sequence=16, rounds=2)
    result = benchmark.measure(case, tmp_path, "cpu", list(benchmark.WAYS))
    state = 12 * result["parameters"]  # master weights and two moments in float32
    medians = result["medians"]
    for way in (benchmark.BACKGROUND, benchmark.WAITING, benchmark.RAW, benchmark.DEEPSPEED, benchmark.THEIRS):
        assert medians[way]["bytes"] >= state, way
    assert medians[benchmark.BACKGROUND]["bytes"] == pytest.approx(medians[benchmark.WAITING]["bytes"], rel=0.01)
    assert medians[benchmark.WAITING]["bytes"] < state + 2**18
    for way, turns in result["turns"].items():
        assert len(turns) == 2
        in_background = way in (benchmark.BACKGROUND, benchmark.NO_MODEL)
        assert all(turn["held_up"] > 0 and turn["on_disk"] > 0 for turn in turns)
        assert in_background or all(turn["held_up"] <= turn["on_disk"] for turn in turns)
    with_model, without = medians[benchmark.BACKGROUND]["bytes"], medians[benchmark.NO_MODEL]["bytes"]
    assert with_model == pytest.approx(without, rel=0.02), "in float32 no number is written twice"
    assert "| 10m | torch.save |" in benchmark.table([result])
    assert benchmark.quartiles([3.0, 1.0, 2.0, 5.0]) == [2.0, 2.5, 3.0]

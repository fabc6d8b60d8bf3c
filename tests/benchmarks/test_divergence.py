"""The benchmark of the guard compares equal work, and its first two loops look at nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_trainer.engine.training_engine import TrainingEngine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import divergence as benchmark  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: dict[int, bool] = {}
    step = TrainingEngine.step

    def noted(self: TrainingEngine, skip_update: bool = False) -> bool:
        guarded[id(self)] = self.guarded
        return step(self, skip_update)

    monkeypatch.setattr(TrainingEngine, "step", noted)
    result = benchmark.measure(benchmark.LINES[1]._replace(rounds=1, block=2))
    assert result["same_work"]
    assert sorted(guarded.values()) == [False, False, True, True]
    for clock in benchmark.CLOCKS:
        assert all(ratio > 0 for name in benchmark.LOOPS[1:] for ratio in result[clock][name])
        assert benchmark.table([result], clock).count("\n") == 2

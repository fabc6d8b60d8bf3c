"""The benchmark of evaluation compares equal work, and counts padding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import evaluation as benchmark  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


@pytest.mark.parametrize("index", [0, 4])
def test_a_line_of_the_table(index: int) -> None:
    case = replace(benchmark.CASES[index], rounds=1, samples=24, hidden=16)
    result = benchmark.measure(case)
    assert result["check"]["passed"]
    lengths = [len(row["input_ids"]) for row in benchmark.Tokens(case).rows]
    order = sorted(lengths, reverse=True) if case.by_length else lengths
    width = sum(case.batch * max(order[i : i + case.batch]) for i in range(0, len(order), case.batch))
    assert result["padding"][benchmark.OURS] == pytest.approx(1 - sum(lengths) / width)
    assert all(result[clock]["ratio"] > 0 for clock in benchmark.CLOCKS)
    assert f"| {case.name} |" in benchmark.table([result])


def test_unequal_work_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(benchmark.CASES[1], rounds=1, samples=16, hidden=16)
    build, calls = benchmark.build_model, []

    def another(case: benchmark.Case) -> object:
        model = build(case)
        if calls:
            for parameter in model.parameters():
                parameter.data *= 3
        calls.append(model)
        return model

    monkeypatch.setattr(benchmark, "build_model", another)
    assert not benchmark.measure(case)["check"]["passed"]

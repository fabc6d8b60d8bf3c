"""The benchmark of ring attention's kernels runs, checks that both sides compute the same, and says so where not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import ring_kernels  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, list[dict[str, Any]]]:
    small = ring_kernels.Case("causal", 1, 4, 2, 64, 16, "float32", rounds=3, warmup=1)
    some = [small, ring_kernels.replace(small, name="window", window=8), ring_kernels.replace(small, documents=3)]
    out = tmp_path / "results.json"
    monkeypatch.setattr(ring_kernels, "cases", lambda device: some)
    monkeypatch.setattr(sys, "argv", ["ring_kernels.py", "--device", "cpu", "--out", str(out)])
    code = ring_kernels.main()
    return code, json.loads(out.read_text(encoding="utf-8"))["cases"]


def test_a_measurement_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results = run(monkeypatch, tmp_path)
    assert code == 0
    assert [result["check"]["passed"] for result in results] == [True] * 3
    for result in results:
        for what in ring_kernels.PASSES:
            low, high = result[what]["ratio"]["ring"]["interval_95"]
            assert 0 < low <= result[what]["ratio"]["ring"]["median"] <= high
    assert capsys.readouterr().out.count("| yes |") == 6


def test_different_results_invalidate_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ring_kernels.ring_attention
    monkeypatch.setattr(ring_kernels, "ring_attention", lambda *args, **options: 1.001 * right(*args, **options))
    code, results = run(monkeypatch, tmp_path)
    assert code == 1
    assert not any(result["check"]["passed"] for result in results)


def test_all_cases_fit_their_plans() -> None:
    for device in ("cuda", "cpu"):
        for case in ring_kernels.cases(device):
            assert case.heads % case.key_heads == 0
            assert ring_kernels.plan_of(case).length == case.tokens
            assert case.dtype in ring_kernels.TOLERANCE
            assert getattr(torch, case.dtype)

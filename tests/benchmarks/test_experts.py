"""The table of divided experts at size has the bytes that follow from the routes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import experts
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.step_time import exchanged_bytes
from tests.planner.test_divided_experts import model

pytestmark = pytest.mark.extended


def test_what_is_counted_is_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    experts.main(["--tokens", "64", "--devices", "64", "--models", "30B-A3B"])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[2] for line in lines] == ["whole, ZeRO 3", "over 8", "over 64"]
    for line, ep in zip(lines[1:], (8, 64), strict=True):
        one = exchanged_bytes(model(), Candidate(64, 64, ep=ep))
        assert float(line[3]) == pytest.approx(4 * 48 * one / 1e9, rel=0.15)
    kernels = [int(line[4].replace(",", "")) for line in lines]
    assert kernels[0] < kernels[1] == kernels[2] < 100 * 48
    # No rank has a tensor of all experts, and few with most of them: the embedding is larger then.
    largest = [float(line[6]) for line in lines]
    assert largest[0] > largest[1] == largest[2]


def test_a_layer_is_timed_on_ranks_that_share_a_device(tmp_path: Path) -> None:
    """The part of the GPU kit, on the CPU: what is sent are the rows for the other rank, four times in both passes."""
    script = Path(experts.__file__).parent / "gpu_experts.py"
    command = [sys.executable, str(script), "--device", "cpu", "--ranks", "1", "2", "--out", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["cases"]
    named = [(case["ranks"], case["routing"], case["way"]) for case in found]
    alone = [(1, routing, way) for routing in ("even", "to one rank") for way in ("exchange", "loop", "grouped")]
    assert named == [*alone, (2, "even", "exchange"), (2, "to one rank", "exchange")]
    assert all(case["tokens_per_second"] > 0 and 0 <= case["exchange_share"] < 1 for case in found)
    assert [case["bytes_sent"] for case in found] == [0] * 6 + [4 * 64 * 32 * 2, 2 * (64 * 2) * 32 * 2]

"""The table of divided experts at size has the bytes that follow from the routes."""

from __future__ import annotations

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

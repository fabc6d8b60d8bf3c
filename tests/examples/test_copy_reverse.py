"""The example learns its task for real, under ZeRO-3 with two ranks, and says so in its metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.conftest import ROOT, losses, results

sys.path.insert(0, str(ROOT / "examples"))

import copy_reverse

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_held_out_samples_are_not_trained_on() -> None:
    train, held_out = copy_reverse.pairs()
    known = {tuple(row["input_ids"]) for row in train}
    assert len(held_out) == copy_reverse.HELD_OUT
    assert not [row for row in held_out if tuple(row["input_ids"]) in known]
    assert all(row["labels"][:-1] == row["input_ids"][-2::-1] for row in held_out)


def test_its_loss_falls_on_two_ranks(run_example: Callable[..., Path]) -> None:
    out = run_example("copy_reverse", "--max_steps", "60", "--logging_steps", "20", ranks=2)
    found = losses(out)
    assert len(found) == 3 and found[2] < 0.9 * found[0]
    assert 0 <= results(out)["eval_held_out_exact_match"] <= 1


# Instead: test_its_loss_falls_on_two_ranks
@pytest.mark.matrix
def test_it_learns_to_write_backwards_on_two_ranks(run_example: Callable[..., Path]) -> None:
    out = run_example("copy_reverse", ranks=2)
    metrics = json.loads((out / "all_results.json").read_text(encoding="utf-8"))
    assert metrics["eval_held_out_exact_match"] > 0.9
    assert json.loads((out / "ds_config.json").read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 3

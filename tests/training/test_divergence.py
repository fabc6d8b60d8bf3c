"""A step that would ruin the weights: left out, stopped at, gone back from; the same on all ranks, in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.diverging import Rows, run
from tests.support.pool import pool
from tests.support.resuming import Story

STEPS, SIZE = 6, 8
CLEAN = partial(Rows, STEPS, SIZE)

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1 rank": (1, "nan", {}),
    "bf16, 1 rank": (1, "nan", {"bf16": True}),
    **{f"zero {stage}": (2, "nan", {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    **{f"bf16, zero {stage}": (2, "inf", {"zero_stage": stage, "bf16": True}) for stage in (0, 1, 2, 3)},
    "accumulation": (2, "nan", {"zero_stage": 2, "gradient_accumulation_steps": 4}),
    "gradient alone": (2, "gradient", {"zero_stage": 1, "gradient_accumulation_steps": 2}),
    "gradient alone, zero 0": (2, "gradient", {"zero_stage": 0, "max_grad_norm": 0.0}),
    "loss alone": (2, "loss alone", {"zero_stage": 3}),
    "loss alone, zero 0": (2, "loss alone", {"zero_stage": 0}),
    "offload": (2, "nan", {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "offload, zero 3": (2, "nan", {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    "tp 2": (2, "nan", {"tensor_parallel_size": 2, "zero_stage": 0}),
    "tp 2, zero 3": (2, "gradient", {"tensor_parallel_size": 2, "zero_stage": 3}),
    "sp 2": (2, "nan", {"sequence_parallel_size": 2, "zero_stage": 1}),
    "4 ranks": (4, "nan", {"zero_stage": 3}),
    "4 ranks, tp 2": (4, "inf", {"zero_stage": 2, "tensor_parallel_size": 2, "bf16": True}),
}


def rates(story: Story) -> list[float]:
    return [rate for _, _, rate in story.logs]


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_skipped_was_never_there(name: str, tmp_path: Path) -> None:
    world, trap, arguments = CASES[name]
    found = pool(world).run(partial(run, str(tmp_path / "bad"), Rows(STEPS, SIZE, bad=(2,)), trap, **arguments))
    wanted = pool(world).run(
        partial(run, str(tmp_path / "clean"), Rows(STEPS, SIZE, without=(2,)), trap, stop_at=STEPS - 1, **arguments)
    )
    for (story, counted), (other, _) in zip(found, wanted, strict=True):
        assert (counted["skipped"], counted["at"]) == (1, [3])
        assert story.step == STEPS
        assert story.state == other.state
        assert rates(story)[:3] + rates(story)[4:] == rates(other)
        assert rates(story)[2] == rates(story)[3]  # the schedule waits
        assert [entry.get("skipped_steps") for entry in counted["history"][:4]] == [None, None, 1.0, 1.0]

"""Which evaluation is the best, and which checkpoint is said to be its."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ds_trainer import TrainingArguments
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.training.loop.best_model import judge, note_checkpoint
from tests.support.checkpoints import save


def judged(greater: bool, *values: float, **arguments: object) -> tuple[list[bool], TrainerState]:
    args = TrainingArguments(
        "out",
        eval_strategy="steps",
        metric_for_best_model="score",
        greater_is_better=greater,
        **arguments,  # type: ignore[arg-type]
    )
    state, found = TrainerState(), []
    for step, value in enumerate(values, start=1):
        state.global_step = step
        found.append(judge(args, state, {"eval_score": value}))
    return found, state


@pytest.mark.parametrize("greater", [True, False])
def test_an_equal_value_is_not_better(greater: bool) -> None:
    """Early stopping counts on it, and the first checkpoint of a value is the one to keep."""
    sign = 1 if greater else -1
    found, state = judged(greater, 2 * sign, 2 * sign, 1 * sign, 3 * sign, 3 * sign)
    assert found == [True, False, False, True, False]
    assert (state.best_metric, state.best_global_step) == (3 * sign, 4)


@pytest.mark.parametrize("greater", [True, False])
def test_any_number_is_better_than_none(greater: bool) -> None:
    for value in (-1e30, 0.0, 1e30):
        found, state = judged(greater, value)
        assert found == [True] and state.best_metric == value
    found, state = judged(greater, math.nan, 1.0)
    assert found == [False, True] and state.best_global_step == 2


def test_without_checkpoints_there_is_no_best_step() -> None:
    _, state = judged(True, 1.0, 2.0, save_strategy="no")
    assert not state.best_global_step and state.best_metric == 2.0


def test_the_best_checkpoint_must_exist(tmp_path: Path) -> None:
    state = TrainerState()
    state.global_step, state.best_global_step = 5, 0
    note_checkpoint(state, tmp_path)
    assert state.best_model_checkpoint is None
    state.best_global_step = 3
    note_checkpoint(state, tmp_path)  # there is no checkpoint of step 3
    assert state.best_model_checkpoint is None
    path = save(tmp_path, 3)
    note_checkpoint(state, tmp_path)
    assert state.best_model_checkpoint == str(path)
    state.best_global_step = 5  # about to be written
    note_checkpoint(state, tmp_path)
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-5")

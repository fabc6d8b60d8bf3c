"""The plan of a run that resumes with another global batch: given steps count all steps of the run."""

from __future__ import annotations

import pytest

from ds_trainer import TrainingArguments
from ds_trainer.training.loop.run_plan import RunPlan


def plan(micro_steps: int | None, **arguments: float) -> tuple[RunPlan, TrainingArguments]:
    args = TrainingArguments("out", **arguments)  # type: ignore[arg-type]
    return RunPlan.of(args, micro_steps), args


@pytest.mark.parametrize(("epoch", "micro_steps", "global_step"), [(0, 3, 5), (1, 0, 12), (2, 9, 49)])
def test_given_max_steps_are_kept(epoch: int, micro_steps: int, global_step: int) -> None:
    made, args = plan(10, max_steps=50)
    changed = made.with_another_batch(args, epoch, micro_steps, global_step)
    assert changed.max_steps == 50 and changed.planned_steps == 50
    remaining = 10 - micro_steps
    assert changed.epochs == epoch + 1 + -(-max(0, 50 - global_step - remaining) // 10)


def test_given_epochs_are_kept() -> None:
    made, args = plan(10, num_train_epochs=3)
    assert (made.max_steps, made.epochs) == (30, 3)
    changed = made.with_another_batch(args, 1, 4, 23)  # 23 smaller steps so far; 6 and 10 to go
    assert (changed.max_steps, changed.epochs, changed.planned_steps) == (39, 3, 30)
    partial_plan, args = plan(10, num_train_epochs=1.5)
    changed = partial_plan.with_another_batch(args, 1, 2, 23)
    assert (changed.max_steps, changed.epochs) == (26, 2)


def test_data_without_a_length_has_no_epochs() -> None:
    made, args = plan(None, max_steps=7)
    assert made.with_another_batch(args, 0, 3, 2) is made


def test_accumulation_ends_with_the_epoch() -> None:
    made, args = plan(10, num_train_epochs=2, gradient_accumulation_steps=4)
    assert (made.steps_per_epoch, made.max_steps) == (3, 6)
    assert [made.micro_steps_after(done) for done in (0, 4, 8, 10)] == [4, 4, 2, 0]
    assert made.with_another_batch(args, 0, 4, 5).max_steps == 5 + 2 + 3

"""The length of a run: steps from epochs, samples, accumulation and max_steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer import ParallelLayout, TrainingArguments
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.loop.run_plan import RunPlan


def plan(micro_steps: int, **arguments: Any) -> RunPlan:
    return RunPlan.of(TrainingArguments("out", **arguments), micro_steps)


@pytest.mark.parametrize(
    ("micro_steps", "arguments", "steps", "epochs"),
    [
        (10, {"num_train_epochs": 3}, 30, 3),
        (10, {"num_train_epochs": 2, "gradient_accumulation_steps": 4}, 6, 2),  # 4 + 4 + 2 micro-batches an epoch
        (10, {"num_train_epochs": 0.5}, 5, 1),
        (10, {"num_train_epochs": 1.25}, 13, 2),
        (10, {"max_steps": 25}, 25, 3),
        (3, {"gradient_accumulation_steps": 8}, 3, 3),  # an epoch shorter than an accumulation is a step
    ],
)
def test_steps_and_epochs(micro_steps: int, arguments: dict[str, Any], steps: int, epochs: int) -> None:
    found = plan(micro_steps, **arguments)
    assert (found.max_steps, found.epochs) == (steps, epochs)


@given(st.integers(1, 60), st.integers(1, 8))
def test_the_steps_of_an_epoch_use_all_its_micro_steps(micro_steps: int, accumulation: int) -> None:
    found = plan(micro_steps, gradient_accumulation_steps=accumulation)
    sizes: list[int] = []
    while found.micro_steps_after(sum(sizes)):
        sizes.append(found.micro_steps_after(sum(sizes)))
        assert (found.epoch_after(2, len(sizes), sum(sizes)) == 3.0) is (len(sizes) == found.steps_per_epoch)
    assert sum(sizes) == micro_steps and all(1 <= size <= accumulation for size in sizes)
    assert len(sizes) == found.steps_per_epoch


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 30))
def test_a_changed_batch_size_ends_at_the_same_sample(
    samples: int, before: int, now: int, accumulation: int, done: int
) -> None:
    """Steps left are those that the samples left make, whatever the batch was."""
    args = TrainingArguments("out", num_train_epochs=3, gradient_accumulation_steps=accumulation)
    old, new = BatchPlan(ParallelLayout(1), before), BatchPlan(ParallelLayout(1), now, accumulation)
    epoch, steps = divmod(done, old.steps(samples))
    if epoch > 2:
        return
    remaining = samples - min(samples, steps * before)
    plan = RunPlan.of(args, new.micro_steps(samples))
    found = plan.with_another_batch(args, epoch, plan.micro_steps_per_epoch - new.micro_steps(remaining), done)
    assert found.max_steps == done + new.steps(remaining) + (2 - epoch) * new.steps(samples)
    assert found.epochs == 3 and found.planned_steps == plan.max_steps


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_steps_are_those_of_the_batch_plan(samples: int, dp: int, micro: int, accumulation: int) -> None:
    batches = BatchPlan(ParallelLayout(dp), micro, accumulation)
    found = plan(batches.micro_steps(samples), gradient_accumulation_steps=accumulation)
    assert found.steps_per_epoch == batches.steps(samples) == math.ceil(samples / batches.global_batch_size)

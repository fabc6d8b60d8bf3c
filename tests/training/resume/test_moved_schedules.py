"""A new schedule stands where the old one stood, whatever kind it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

from ds_trainer.training.resume.changed_arguments import move_schedule

RATE = 0.5


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)


KINDS: dict[str, Any] = {
    "of the step": lambda: LambdaLR(optimizer(), lambda step: 1 / (1 + step)),
    "step by step": lambda: ExponentialLR(optimizer(), 0.9),
    "in stairs": lambda: StepLR(optimizer(), 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", [1, 2, 5, 7])
def test_a_moved_schedule_equals_a_stepped_one(kind: str, done: int) -> None:
    stepped, moved = KINDS[kind](), KINDS[kind]()
    for _ in range(done):
        stepped.optimizer.step()
        stepped.step()
    moved.optimizer.step()
    move_schedule(moved, {"last_epoch": done}, steps=99)
    for _ in range(4):
        assert moved.get_last_lr() == pytest.approx(stepped.get_last_lr())
        assert moved.last_epoch == stepped.last_epoch
        for one in (moved, stepped):
            one.optimizer.step()
            one.step()


def test_a_schedule_that_was_never_stepped_is_not_moved() -> None:
    moved = KINDS["of the step"]()
    move_schedule(moved, {"last_epoch": 0}, steps=5)
    assert moved.last_epoch == 0 and moved.get_last_lr() == [RATE]


def test_a_schedule_without_a_saved_step_is_moved_to_the_step() -> None:
    moved = KINDS["of the step"]()
    moved.optimizer.step()
    move_schedule(moved, {}, steps=3)
    assert moved.get_last_lr() == [RATE / 4]


def test_evaluations_of_an_old_schedule_are_not_steps() -> None:
    moved = KINDS["of the step"]()
    moved.optimizer.step()
    plateau = ReduceLROnPlateau(optimizer())
    plateau.step(1.0)
    move_schedule(moved, plateau.state_dict(), steps=3)
    assert moved.get_last_lr() == [RATE / 4]


def test_a_deepspeed_schedule_is_moved_to_the_step() -> None:
    from deepspeed.runtime.lr_schedules import WarmupLR

    made = [WarmupLR(optimizer(), 0.0, 1.0, 10, "linear") for _ in range(2)]
    for _ in range(6):
        made[0].step()
    move_schedule(made[1], made[0].state_dict(), steps=99)
    assert made[1].state_dict() == made[0].state_dict()


def test_a_schedule_that_follows_a_metric_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    moved = ReduceLROnPlateau(optimizer())
    move_schedule(moved, {"last_epoch": 5}, steps=5)
    assert moved.last_epoch == 0 and "ReduceLROnPlateau" in caplog.text

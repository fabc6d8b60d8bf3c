"""Losses between two logs: every micro-batch and every step counts once, and nothing of the window before."""

from __future__ import annotations

import math

import pytest
import torch

from ds_trainer.training.loop import loss_window
from ds_trainer.training.loop.loss_window import LossWindow


def window(filtered: bool = True) -> LossWindow:
    return LossWindow(torch.device("cpu"), filtered)


def step(losses: LossWindow, *micro_losses: float) -> None:
    losses.add_step([torch.tensor(loss) for loss in micro_losses])


def test_a_step_is_the_sum_of_its_micro_batches_and_a_window_the_mean_of_its_steps() -> None:
    losses = window()
    step(losses, 1.0, 2.0)
    step(losses, 4.0)
    assert losses.close() == (3.5, 2)
    step(losses, 7.0)
    assert losses.close() == (7.0, 1)


def test_many_steps_are_combined_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_window, "_CHUNK", 3)
    losses = window()
    for number in range(8):
        step(losses, float(number))
        assert len(losses._steps) < 3
    assert losses.close() == (3.5, 8)


def test_non_finite_losses_are_left_out_if_requested() -> None:
    for filtered in (True, False):
        losses = window(filtered)
        step(losses, 1.0, math.nan)
        step(losses, 5.0)
        mean, steps = losses.close()
        assert (mean, steps) == (5.0, 1) if filtered else math.isnan(mean) and steps == 2
    losses = window()
    step(losses, math.inf)
    mean, steps = losses.close()
    assert math.isnan(mean) and steps == 0


def test_steps_undone_by_a_rollback_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_window, "_CHUNK", 2)
    losses = window()
    for _ in range(3):
        step(losses, 100.0)
    losses.forget()
    step(losses, 1.0)
    assert losses.close() == (1.0, 1)

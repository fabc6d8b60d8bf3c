"""Moves a new schedule to the step at which a run resumes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.optim.schedule_stepping import steps_on_metric
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def move_schedule(schedule: Any, saved: Mapping[str, Any], steps: int) -> None:
    """Move a new ``schedule`` to the step at which the old one was ``saved``.

    Args:
        schedule: a new schedule that has not been stepped.
        saved: the state of the old schedule, with its number of steps.
        steps: optimizer steps done, used if ``saved`` has no number of steps.
    """
    if steps_on_metric(schedule):
        logger.warning("The new schedule (%s) follows a metric and starts fresh.", type(schedule).__name__)
        return
    if "num_bad_epochs" in saved:  # it followed a metric, and counted evaluations
        saved = {}
    done = int(saved.get("last_epoch", saved.get("last_batch_iteration", steps)))
    if done <= 0:
        return
    if "last_batch_iteration" in inspect.signature(schedule.step).parameters:  # a schedule of DeepSpeed
        schedule.step(done)
    elif isinstance(schedule, LambdaLR):  # a function of the step only
        schedule.last_epoch = done - 1
        schedule._step_count = done + 1
        schedule.step()
    else:
        for _ in range(done):
            schedule.step()


class MovedSchedule:
    """A schedule where it has been moved to, so that a rollback can put it back there.

    Args:
        schedule: the moved schedule.
        optimizer: its optimizer.
    """

    def __init__(self, schedule: Any, optimizer: torch.optim.Optimizer) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = copy.deepcopy(schedule.state_dict())
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Put schedule and learning rates back. A learning rate that is a tensor stays the same object."""
        self._schedule.load_state_dict(copy.deepcopy(self._state))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

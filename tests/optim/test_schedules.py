"""Schedules are those of transformers, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_trainer.arguments.support import SCHEDULES
from ds_trainer.optim.schedules import build_schedule
from ds_trainer.utils.errors import ConfigError


def rates(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    from transformers import get_scheduler

    ours, theirs = optimizer(), optimizer()
    found = rates(build_schedule(name, ours, warmup, 20), ours, 22)
    assert found == pytest.approx(rates(get_scheduler(str(name), theirs, warmup, 20), theirs, 22))


def test_an_argument_reaches_the_schedule_and_an_unknown_one_is_refused() -> None:
    one = optimizer()
    found = rates(build_schedule("cosine", one, 0, 10, {"num_cycles": 1.0}), one, 11)
    assert found[5] == pytest.approx(0.0) and found[10] == pytest.approx(0.3)
    with pytest.raises(ConfigError, match=r"'num_cycle' is not an argument of .*cosine.*Did you mean 'num_cycles'"):
        build_schedule("cosine", optimizer(), 0, 10, {"num_cycle": 1.0})

"""Adafactor computes its own learning rate; that rate is what is logged, as by transformers' Trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor, AdafactorSchedule

from ds_trainer import ConfigError
from ds_trainer.optim.schedule_stepping import with_rates_of_the_optimizer
from ds_trainer.optim.schedules import build_schedule
from tests.parity.library import Library, assert_same, both, logs
from tests.support.models import tiny_llama

OWN: list[dict[str, Any]] = [
    {},
    {"warmup_init": True},
    {"scale_parameter": False},
    {"scale_parameter": False, "warmup_init": True, "beta1": 0.9},
]


def rates(schedule: Any, steps: int, clear: bool) -> list[list[float]]:
    """The rates after each step; with ``clear``, gradients are gone when the schedule is stepped."""
    found, optimizer = [], schedule.optimizer
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.1 + step)
        optimizer.step()
        if clear:
            optimizer.zero_grad()
        schedule.step()
        found.append([float(rate) for rate in schedule.get_last_lr()])
    return found


def adafactor(**arguments: Any) -> Adafactor:
    parameters = [torch.nn.Parameter(torch.full((3, 2), value)) for value in (0.5, 2.0)]
    return Adafactor([{"params": [parameter]} for parameter in parameters], lr=None, **arguments)


@pytest.mark.parametrize("arguments", OWN)
def test_rates_do_not_need_gradients(arguments: dict[str, Any]) -> None:
    wanted = rates(AdafactorSchedule(adafactor(**arguments)), 5, clear=False)
    schedule = with_rates_of_the_optimizer(AdafactorSchedule(adafactor(**arguments), initial_lr=0.25))
    assert schedule.get_last_lr() == [0.25, 0.25]
    found = rates(schedule, 5, clear=True)
    assert found == [pytest.approx(each) for each in wanted] and all(rate > 0 for each in found for rate in each)
    assert isinstance(schedule, AdafactorSchedule) and with_rates_of_the_optimizer(schedule) is schedule


def test_a_parameter_that_was_never_updated_has_the_initial_rate() -> None:
    optimizer = adafactor(scale_parameter=False)
    schedule = with_rates_of_the_optimizer(AdafactorSchedule(optimizer, initial_lr=0.25))
    optimizer.param_groups[1]["params"][0].grad = torch.ones(3, 2)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.25, 1e-2]


def test_other_schedules_stay_as_they_are() -> None:
    for schedule in (None, torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)):
        kind = type(schedule)
        assert with_rates_of_the_optimizer(schedule) is schedule and type(schedule) is kind


def test_the_state_of_the_schedule_is_plain(tmp_path: Path) -> None:
    schedule = with_rates_of_the_optimizer(AdafactorSchedule(adafactor()))
    rates(schedule, 2, clear=True)
    torch.save(schedule.state_dict(), tmp_path / "schedule.pt")
    restored = with_rates_of_the_optimizer(AdafactorSchedule(adafactor()))
    restored.load_state_dict(torch.load(tmp_path / "schedule.pt", weights_only=True))
    assert restored.get_last_lr() == schedule.get_last_lr() != [0.0, 0.0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("arguments", OWN[:3])
def test_the_logged_rates_are_those_of_transformers(arguments: dict[str, Any], tmp_path: Path) -> None:
    def script(library: Library) -> list[dict[str, Any]]:
        model = tiny_llama()
        optimizer = Adafactor(model.parameters(), lr=None, **arguments)
        trainer = library.trainer(model=model, optimizers=(optimizer, AdafactorSchedule(optimizer, 0.125)))
        trainer.train()
        assert trainer.lr_scheduler.get_last_lr()[0] > 0
        return logs(trainer, "learning_rate", "loss", "step")

    ours, reference = both(script, tmp_path)
    assert_same(ours, reference)
    logged = [entry["learning_rate"] for entry in ours if "learning_rate" in entry]
    assert logged[0] == 0.125 and len(logged) == 4 and 0 < logged[1] < 0.1  # reported after the first update
    if arguments == {"scale_parameter": False}:
        assert logged[1:] == [pytest.approx(min(1e-2, 1 / math.sqrt(step))) for step in (1, 2, 3)]


def test_the_logged_rate_of_optim_adafactor(tmp_path: Path) -> None:
    def script(library: Library) -> list[dict[str, Any]]:
        trainer = library.trainer({"optim": "adafactor", "warmup_steps": 2})
        trainer.train()
        return logs(trainer, "learning_rate", "loss", "step")

    ours, reference = both(script, tmp_path)
    assert_same(ours, reference)


def test_a_schedule_cannot_change_a_rate_that_the_optimizer_computes() -> None:
    with pytest.raises(ConfigError, match=r"Adafactor .* \(lr=None\), so lr_scheduler_type=linear .*AdafactorSchedule"):
        build_schedule("linear", adafactor(), 0, 10)

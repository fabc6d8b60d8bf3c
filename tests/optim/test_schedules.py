"""Schedules match those of transformers, step by step."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.optim.schedule_stepping import steps_on_metric
from ds_trainer.optim.schedules import build_schedule, check_schedule, schedule_arguments
from ds_trainer.utils.errors import ConfigError

RATES = (0.3, 0.02)
TOTAL = 20
ON_STEPS: dict[str, list[dict[str, Any]]] = {
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"lr_end": 0.01, "power": 2.0}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "cosine_with_min_lr": [{"min_lr": 0.05}, {"min_lr_rate": 0.1, "num_cycles": 1.0}],
    "cosine_warmup_with_min_lr": [
        {"min_lr": 0.05},
        {"min_lr_rate": 0.1, "num_cycles": 1.0},
        {"min_lr_rate": 0.1, "warmup_lr_rate": 0.25},
        {"min_lr_rate": 0.1, "warmup_lr_rate": 0.0},
    ],
    "warmup_stable_decay": [
        {"num_decay_steps": 6},
        {"num_decay_steps": 6, "num_stable_steps": 3, "min_lr_ratio": 0.1},
        {"num_decay_steps": 6, "warmup_type": "cosine", "decay_type": "linear", "min_lr_ratio": 0.1},
        {"num_decay_steps": 6, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"},
        {"num_decay_steps": 6, "num_cycles": 1.5},
    ],
}
ON_METRIC: dict[str, list[dict[str, Any]]] = {
    "reduce_lr_on_plateau": [
        {"patience": 2},
        {"patience": 1, "factor": 0.5, "mode": "max", "threshold_mode": "abs", "cooldown": 2},
        {"patience": 0, "min_lr": [0.1, 0.001], "threshold": 0.1},
    ],
    "greedy": [
        {"patience": 1},
        {"patience": 0, "factor": 0.5, "mode": "max", "threshold_mode": "rel", "cooldown": 2, "warmup": 1},
        {"patience": 0, "factor": 0.5, "smooth": True, "window_size": 4, "min_lr": [0.1, 0.01], "max_lr": [0.5, 0.02]},
        {"patience": 0, "factor": 0.5, "min_lr": 0.01, "reset_start": 3, "warmup": 1},
    ],
}


def cases(table: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, arguments) for name, several in table.items() for arguments in several]


def optimizer(tensor_rates: bool = False) -> torch.optim.Optimizer:
    """Two groups of different rates; the first is the optimizer's own."""
    rates: Any = [torch.tensor(rate, dtype=torch.float64) for rate in RATES] if tensor_rates else RATES
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in rates]
    return torch.optim.SGD([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": rates[1]}], lr=rates[0])


def current(one: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in one.param_groups]


def run(schedule: Any, one: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        assert [float(rate) for rate in schedule.get_last_lr()] == current(one)
        found.append(current(one))
        one.step()
        schedule.step()
    return found


def metrics(count: int = 60) -> list[float]:
    """Improves, gets stuck, gets worse, improves again; noisy."""
    noise = random.Random(0)
    return [math.cos(step / 9) + 0.05 * noise.random() for step in range(count)]


def follow(schedule: Any, one: torch.optim.Optimizer, values: list[float]) -> list[list[float]]:
    found = []
    for value in values:
        schedule.step(value)
        assert [float(rate) for rate in schedule.get_last_lr()] == current(one)
        found.append(current(one))
    return found


def close(found: list[list[float]], wanted: list[list[float]], tolerance: float = 1e-12) -> bool:
    flat = [(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    return all(abs(a - b) <= tolerance for a, b in flat)


def test_every_schedule_is_compared() -> None:
    assert {*ON_STEPS, *ON_METRIC} == {str(name) for name in SchedulerType}


@pytest.mark.parametrize("warmup", [0, 1, 4, TOTAL, TOTAL + 5])
@pytest.mark.parametrize(("name", "arguments"), cases(ON_STEPS))
def test_rates_are_those_of_transformers(name: str, arguments: dict[str, Any], warmup: int) -> None:
    from transformers import get_scheduler

    ours, expected = optimizer(), optimizer()
    reference = get_scheduler(name, expected, warmup, TOTAL, arguments)
    steps = TOTAL + 3
    if name == "polynomial" and warmup == TOTAL:
        steps = TOTAL - 1  # the reference divides by zero in the next step
    found = run(build_schedule(name, ours, warmup, TOTAL, arguments), ours, steps)
    assert close(found, run(reference, expected, steps))
    assert warmup in (0, 1) or name == "constant" or found[0] != found[1]


@pytest.mark.parametrize("warmup", [0, 6])
@pytest.mark.parametrize(("name", "arguments"), cases(ON_STEPS))
def test_keywords_are_those_of_transformers(name: str, arguments: dict[str, Any], warmup: int) -> None:
    """What scripts read in ``lr_lambdas[0].keywords``, and the rates of 50 steps."""
    from transformers import get_scheduler

    ours, expected = optimizer(), optimizer()
    reference = get_scheduler(name, expected, warmup, 50, arguments)
    schedule = build_schedule(name, ours, warmup, 50, arguments)
    for found, wanted in zip(schedule.lr_lambdas, reference.lr_lambdas, strict=True):
        assert found.keywords == getattr(wanted, "keywords", {}) and found.args == ()  # constant: a plain function
    assert close(run(schedule, ours, 50), run(reference, expected, 50))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("inverse_sqrt", {"timescale": None}),
        ("warmup_stable_decay", {"num_decay_steps": 6, "num_stable_steps": None}),
        ("cosine_with_min_lr", {"min_lr": None, "min_lr_rate": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.05, "min_lr_rate": None, "warmup_lr_rate": None}),
    ],
)
def test_null_is_the_default(name: str, arguments: dict[str, Any]) -> None:
    from transformers import get_scheduler

    (found, _) = build_schedule(name, optimizer(), 4, 50, arguments).lr_lambdas
    assert found.keywords == get_scheduler(name, optimizer(), 4, 50, arguments).lr_lambdas[0].keywords


@pytest.mark.parametrize(("name", "arguments"), cases(ON_METRIC))
def test_attributes_are_those_of_transformers(name: str, arguments: dict[str, Any]) -> None:
    """Schedules that follow a metric keep their keywords as attributes."""
    from transformers import get_scheduler

    schedule, reference = (
        build_schedule(name, optimizer(), 0, 50, arguments),
        get_scheduler(name, optimizer(), 0, 50, arguments),
    )
    kept = [key for key in schedule_arguments(name) if hasattr(reference, key)]
    assert len(kept) > 5 and {key: getattr(schedule, key) for key in kept} == {
        key: getattr(reference, key) for key in kept
    }


@pytest.mark.parametrize(("name", "arguments"), cases(ON_METRIC))
def test_rates_follow_a_metric_as_those_of_transformers(name: str, arguments: dict[str, Any]) -> None:
    from transformers import get_scheduler

    ours, expected = optimizer(), optimizer()
    reference = get_scheduler(name, expected, 0, TOTAL, arguments)
    found = follow(build_schedule(name, ours, 0, TOTAL, arguments), ours, metrics())
    assert close(found, follow(reference, expected, metrics()))
    assert len({tuple(rates) for rates in found}) > 2  # they move


def test_greedy_resets_after_waiting_at_its_lower_bound() -> None:
    one = optimizer()
    schedule = build_schedule("greedy", one, 0, 0, {"patience": 0, "factor": 0.1, "min_lr": 0.02, "reset_start": 2})
    found = follow(schedule, one, [1.0] * 8)
    assert [rates[0] for rates in found] == pytest.approx([1.0, 0.1, 0.02, 0.3, 1.0, 0.1, 0.02, 0.3])


@pytest.mark.parametrize("at", [1, 7, 15])
@pytest.mark.parametrize(("name", "arguments"), cases({**ON_STEPS, **ON_METRIC}))
def test_a_loaded_state_continues_the_schedule(name: str, arguments: dict[str, Any], at: int, tmp_path: Path) -> None:
    """Through a file, read as a checkpoint is; the new optimizer has other rates until the state is loaded."""
    uninterrupted = optimizer()
    schedule = build_schedule(name, uninterrupted, 3, TOTAL, arguments)
    on_metric = steps_on_metric(schedule)

    def advance(one: Any, over: torch.optim.Optimizer, first: int, last: int) -> list[list[float]]:
        return follow(one, over, metrics()[first:last]) if on_metric else run(one, over, last - first)

    advance(schedule, uninterrupted, 0, at)
    torch.save(schedule.state_dict(), tmp_path / "scheduler.pt")
    wanted = advance(schedule, uninterrupted, at, at + 20)

    resumed = optimizer()
    restored = build_schedule(name, resumed, 3, TOTAL, arguments)
    restored.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    if not on_metric:  # torch's LambdaLR leaves the rates to the optimizer's own state
        for group, rate in zip(resumed.param_groups, restored.get_last_lr(), strict=True):
            group["lr"] = rate
    assert advance(restored, resumed, at, at + 20) == wanted


@pytest.mark.parametrize("name", ON_METRIC)
def test_learning_rates_in_tensors_are_updated_in_place(name: str) -> None:
    plain, tensors = optimizer(), optimizer(tensor_rates=True)
    arguments = {"patience": 0, "factor": 0.5, "min_lr": 0.001}
    kept = [group["lr"] for group in tensors.param_groups]
    found = follow(build_schedule(name, tensors, 0, 0, arguments), tensors, metrics())
    assert close(found, follow(build_schedule(name, plain, 0, 0, arguments), plain, metrics()))
    assert all(group["lr"] is tensor for group, tensor in zip(tensors.param_groups, kept, strict=True))


def test_which_schedules_follow_a_metric() -> None:
    from transformers.optimization import GreedyLR

    one = optimizer()
    for name, (arguments, *_) in {**ON_STEPS, **ON_METRIC}.items():
        assert steps_on_metric(build_schedule(name, one, 0, 10, arguments)) == (name in ON_METRIC)
    assert steps_on_metric(torch.optim.lr_scheduler.ReduceLROnPlateau(one)) and steps_on_metric(GreedyLR(one))
    assert not steps_on_metric(torch.optim.lr_scheduler.StepLR(one, 1))


def test_the_arguments_are_those_of_transformers() -> None:
    import inspect

    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for name in SchedulerType:
        reference: Any = {"reduce_lr_on_plateau": plateau, "greedy": GreedyLR}.get(str(name))
        reference = reference or TYPE_TO_SCHEDULER_FUNCTION[str(name)]  # type: ignore[index]
        assert set(schedule_arguments(name)) == set(inspect.signature(reference).parameters) - given


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosine", {"num_cycle": 1.0}, r"'num_cycle' is not an argument of .*cosine.*Did you mean 'num_cycles'"),
        ("linear", {"num_cycles": 1.0}, r"'num_cycles' is not an argument of .*linear; its arguments: none"),
        ("cosine", {"num_cycles": "many"}, r"num_cycles='many' of lr_scheduler_type=cosine must be float"),
        ("inverse_sqrt", {"timescale": 2.5}, r"timescale=2.5 .* must be int or null"),
        ("polynomial", {"lr_end": 0.5}, r"lr_end=0.5 must be below learning_rate=0.3"),
        ("cosine_with_min_lr", {}, r"needs exactly one of min_lr and min_lr_rate .* has neither"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, r"has min_lr=0.1 and min_lr_rate=0.1"),
        ("cosine_warmup_with_min_lr", {}, r"needs exactly one of min_lr and min_lr_rate"),
        ("warmup_stable_decay", {}, r"needs num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "decay_type": "sqrt"}, r"must be one of 'linear', 'cosine'"),
        ("reduce_lr_on_plateau", {"mode": "least"}, r"mode='least' .* must be one of 'min', 'max'"),
        ("greedy", {"factor": 1.5}, r"factor=1.5 of lr_scheduler_kwargs must be below 1"),
        ("reduce_lr_on_plateau", {"factor": 1.0}, r"factor=1.0 of lr_scheduler_kwargs must be below 1"),
        ("greedy", {"mode": "least"}, r"mode='least' .* must be one of 'min', 'max'"),
        ("greedy", {"min_lr": [0.1]}, r"expected 2 min_lrs, got 1"),
        ("reduce_lr_on_plateau", {"min_lr": [0.1]}, r"expected 2 min_lrs, got 1"),
    ],
)
def test_wrong_arguments(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_schedule(name, optimizer(), 0, 10, arguments)


def test_a_floor_for_a_learning_rate_of_zero() -> None:
    with pytest.raises(ConfigError, match=r"min_lr=0\.1 is a fraction of learning_rate, which is 0"):
        check_schedule("cosine_with_min_lr", {"min_lr": 0.1}, 0.0)


def test_all_problems_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        check_schedule("cosine", {"num_cycles": "x", "power": 2}, 0.1)
    assert len(error.value.problems) == 2


def test_greedy_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)
    with pytest.raises(ConfigError, match=r"lr_scheduler_type=greedy uses GreedyLR of transformers.*pip install"):
        check_schedule("greedy", {"patience": 1}, 0.1)
    assert check_schedule("reduce_lr_on_plateau", {"patience": 1}, 0.1) == {"patience": 1}


def test_a_greedy_state_of_an_earlier_version_loads() -> None:
    """The layout of the state has not changed since the schedule was written out here."""
    state = {
        **{"best": 0.5, "cooldown_counter": 0, "last_epoch": 9, "num_bad_epochs": 1, "num_good_epochs": 0},
        **{"reset_start": 500, "warmup_counter": 0, "window": [0.5], "window_sum": 0.5},
        **{"first_rates": [0.3, 0.02], "rates": [0.25, 0.01]},
    }
    one = optimizer()
    schedule = build_schedule("greedy", one, 0, 0, {"patience": 1, "factor": 0.5, "min_lr": 0.001})
    schedule.load_state_dict(state)
    assert schedule.state_dict() == {**state, "window": [], "window_sum": 0.0}
    assert follow(schedule, one, [0.6]) == [[0.125, 0.005]]

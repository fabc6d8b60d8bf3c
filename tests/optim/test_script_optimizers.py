"""An optimizer of a script whose update depends on how its tensors are divided is refused where ZeRO divides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import ConfigError
from ds_trainer.optim.script_optimizers import check_divided_updates


class Scaled(torch.optim.SGD):
    """Divides each gradient by its norm, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class Centered(torch.optim.SGD):
    """Uses the shape: takes the mean of each row from a matrix."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Has a rate that depends on the number of calls."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * self.calls
        return super().step(closure)


class Wrapping(torch.optim.Optimizer):
    """Has another optimizer, as Lookahead does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Sharpness(Wrapping):
    """SAM: computes a second gradient where the first one leads."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        closure()
        return self.base.step()


class Noisy(torch.optim.SGD):
    """Draws numbers, so that no two updates are equal."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Elementwise(torch.optim.AdamW):
    """A subclass that changes nothing."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def groups(layers: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(layer.parameters())} for layer in layers.children()]


def refusal(make: Callable[[nn.Module], Any], stage: int, *sizes: int) -> str:
    layers = model()
    optimizer = make(layers)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # the rate of a warmup; wraps step()
    before, random = [p.detach().clone() for p in layers.parameters()], torch.get_rng_state()
    try:
        check_divided_updates(optimizer, stage, *(sizes or (1,)))
    except ConfigError as error:
        return str(error)
    finally:
        assert all(map(torch.equal, before, layers.parameters())) and torch.equal(random, torch.get_rng_state())
        assert not optimizer.state and getattr(optimizer, "calls", 0) == 0
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, layers.parameters()))
    return ""


@pytest.mark.parametrize(
    "make",
    [
        lambda layers: Scaled(layers.parameters(), lr=0.1),
        lambda layers: Centered(groups(layers), lr=0.1),
        lambda layers: torch.optim.Adafactor(layers.parameters()),
    ],
)
def test_an_update_that_needs_whole_tensors(make: Any) -> None:
    assert refusal(make, 0) == ""
    for text in (refusal(make, 1), refusal(make, 3), refusal(make, 0, 2), refusal(make, 0, 1, 2)):
        assert "depends on whole tensors" in text and "zero_stage=0" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda layers: Elementwise(groups(layers), lr=0.1),
        lambda layers: Wrapping(torch.optim.SGD(layers.parameters(), lr=0.1)),
        lambda layers: Noisy(layers.parameters(), lr=0.1),
        lambda layers: torch.optim.NAdam(layers.parameters()),
    ],
)
def test_other_updates(make: Any) -> None:
    assert [refusal(make, stage) for stage in (0, 1, 2, 3)] == [""] * 4


def test_a_count_of_its_own_calls_at_stage_3() -> None:
    """DeepSpeed calls step() once for each part of a group."""
    assert refusal(lambda layers: Counting(groups(layers), lr=0.1), 2) == ""
    assert refusal(lambda layers: Counting(layers.parameters(), lr=0.1), 3) == ""
    assert "how often step() is called" in refusal(lambda layers: Counting(groups(layers), lr=0.1), 3)


def test_a_step_that_needs_a_closure() -> None:
    assert "step() of LBFGS needs closure" in refusal(lambda layers: torch.optim.LBFGS(layers.parameters()), 0)
    for stage in range(4):
        found = refusal(lambda layers: Sharpness(torch.optim.SGD(layers.parameters(), lr=0.1)), stage)
        assert "step() of Sharpness fails without a closure (Sharpness Aware Minimization requires closure" in found

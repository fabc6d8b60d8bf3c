"""The bias corrections of DeepSpeed's CPUAdam after a resumption, by its rule in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.engine.state.cpu_adam import restore_bias_corrections


class Operator:
    """The powers of beta as ``csrc/includes/cpu_adam.h`` computes them."""

    def __init__(self) -> None:
        self.step, self.betas, self.powers = 0, (np.float32(0), np.float32(0)), (np.float32(1), np.float32(1))

    def adam_update(self, _: int, step: int, __: float, beta1: float, beta2: float, *more: Any) -> None:
        assert all(tensor.numel() == 0 for tensor in more if isinstance(tensor, torch.Tensor))
        betas = (np.float32(beta1), np.float32(beta2))
        if betas == self.betas and step == self.step:
            return
        if step == self.step + 1 and (betas == self.betas or self.step == 0):
            self.powers = tuple(np.float32(p * b) for p, b in zip(self.powers, betas, strict=True))
        else:
            self.powers = tuple(np.float32(float(b) ** step) for b in betas)
        self.step, self.betas = step, betas


def optimizer_of(*betas: tuple[float, float]) -> Any:
    settings = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    return SimpleNamespace(
        histories=None, ds_opt_adam=Operator(), opt_id=0, param_groups=[{**settings, "betas": two} for two in betas]
    )


def take_step(optimizer: Any, step: int) -> list[Any]:
    """What each group is corrected with."""
    found = []
    for group in optimizer.param_groups:
        optimizer.ds_opt_adam.adam_update(0, step, 0.0, *group["betas"])
        found.append(optimizer.ds_opt_adam.powers)
    return found


@pytest.mark.parametrize("betas", [[(0.9, 0.999)], [(0.9, 0.95), (0.9, 0.95)], [(0.9, 0.999), (0.8, 0.99)]], ids=str)
def test_a_resumed_run_has_the_powers_of_the_uninterrupted_one(betas: list[tuple[float, float]]) -> None:
    whole = optimizer_of(*betas)
    powers = [take_step(whole, step) for step in range(1, 40)]
    with_pow = 0
    for done in range(1, 39):
        for resumed in (optimizer_of(*betas), whole):  # a new process, and a rollback in this one
            restore_bias_corrections([SimpleNamespace(histories=None, optimizer=resumed, states={"step": done})] * 2)
            assert take_step(resumed, done + 1) == powers[done]
        with_pow += take_step(optimizer_of(*betas), done + 1) != powers[done]
    assert with_pow or len({*betas}) > 1  # without it most differ


def test_long_runs_take_no_longer() -> None:
    optimizer, counted = optimizer_of((0.9, 0.999)), []
    optimizer.ds_opt_adam = SimpleNamespace(histories=None, adam_update=lambda *given: counted.append(given[1]))
    restore_bias_corrections([SimpleNamespace(histories=None, optimizer=optimizer, states={"step": 10**9})])
    assert counted == list(range(1, len(counted) + 1))
    assert 1 - np.float32(0.999 ** len(counted)) == 1
    assert len(counted) < 20_000


def test_other_optimizers_and_parameters_without_steps_are_left_alone() -> None:
    optimizer = optimizer_of((0.9, 0.999))
    restore_bias_corrections([SimpleNamespace(histories=None, optimizer=optimizer, states={})])
    assert optimizer.ds_opt_adam.step == 0
    restore_bias_corrections(
        [SimpleNamespace(histories=None, optimizer=torch.optim.SGD([torch.zeros(1)]), states={"step": 3})]
    )

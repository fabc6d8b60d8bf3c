"""Schedules that follow a metric: stepped with its value after each evaluation.

Both keep their whole state, the learning rates included, in plain numbers, so that a run that is resumed goes on with
the same rates whatever the optimizer's own state holds.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

Mode = Literal["min", "max"]
ThresholdMode = Literal["rel", "abs"]


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # some optimizers keep it in a tensor and refuse anything else
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class PlateauSchedule(ReduceLROnPlateau):
    """torch's ReduceLROnPlateau, whose state also puts the learning rates back.

    Raises:
        ValueError: an argument that torch refuses.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Mode = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: ThresholdMode = "rel",
        cooldown: int = 0,
        min_lr: float | list[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps)

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """The rate of each parameter group."""
        return _rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state, rates included."""
        return {**super().state_dict(), "_last_lr": _rates(self.optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave, rates included."""
        super().load_state_dict(state_dict)
        for group, rate in zip(self.optimizer.param_groups, state_dict["_last_lr"], strict=True):
            _set_rate(group, rate)


class GreedySchedule:
    """Raises the rate while a metric keeps improving, and lowers it while it does not.

    After more than ``patience`` improvements in a row the rate is divided by ``factor``, after as many failures it is
    multiplied by it. At its lower bound for ``reset_start`` reductions, everything begins anew at the first rate.

    Args:
        optimizer: whose rates are set.
        mode: whether a smaller or a larger metric is better.
        factor: of each change, below 1.
        patience: evaluations in a row without a change.
        threshold: by how much a metric must be better to count.
        threshold_mode: whether ``threshold`` is relative to the best metric.
        cooldown: evaluations that are not looked at after a reduction.
        warmup: the same after an increase.
        min_lr: lower bound of the rate, one for all groups or a list.
        max_lr: upper bound.
        eps: smallest change that is made.
        verbose: print each change.
        smooth: look at the mean of the last ``window_size`` metrics.
        window_size: of that mean.
        reset_start: reductions at the lower bound before the reset.

    Raises:
        ValueError: a list of bounds of another length than the groups.

    Source: GreedyLR, https://arxiv.org/abs/2512.14527; behaviour as of the class in transformers 5.
    """

    _KEPT = (
        "best",
        "cooldown_counter",
        "last_epoch",
        "num_bad_epochs",
        "num_good_epochs",
        "reset_start",
        "warmup_counter",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Mode = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: ThresholdMode = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup, self.eps, self.verbose = cooldown, warmup, eps, verbose
        self.window_size = window_size if smooth else 1
        self.reset_after = reset_start
        self.min_lrs, self.max_lrs = self._per_group("min_lr", min_lr), self._per_group("max_lr", max_lr)
        self.first_rates = _rates(optimizer)
        self.last_epoch = 0
        self._begin()

    def _per_group(self, name: str, bound: float | list[float]) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(bound, list | tuple):
            return [float(bound)] * groups
        if len(bound) != groups:
            raise ValueError(f"{name} has {len(bound)} values for {groups} parameter groups")
        return list(bound)

    def _begin(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_bad_epochs = self.num_good_epochs = self.cooldown_counter = self.warmup_counter = 0
        self.reset_start = self.reset_after
        self.window: list[float] = []
        self.window_sum = 0.0

    def step(self, metrics: float) -> None:
        """Look at the metric of one evaluation, and change the rates if it is time to."""
        self.last_epoch += 1
        current = self._smoothed(float(metrics))
        if self.cooldown_counter > 0 or self.warmup_counter > 0:
            waiting = "cooldown_counter" if self.cooldown_counter > 0 else "warmup_counter"
            setattr(self, waiting, getattr(self, waiting) - 1)
            self.num_bad_epochs = self.num_good_epochs = 0
            return
        if self._is_better(current):
            self.best = current
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._increase()
        elif self.num_bad_epochs > self.patience:
            self._reduce()

    def _smoothed(self, value: float) -> float:
        # A running sum, as in the reference: another order of additions would round to other rates.
        self.window.append(value)
        self.window_sum += value
        if len(self.window) > self.window_size:
            self.window_sum -= self.window.pop(0)
        return value if self.window_size == 1 else self.window_sum / len(self.window)

    def _is_better(self, current: float) -> bool:
        sign = -1.0 if self.mode == "min" else 1.0
        if self.threshold_mode == "rel":
            wanted = self.best * (1.0 + sign * self.threshold)
        else:
            wanted = self.best + sign * self.threshold
        return current < wanted if self.mode == "min" else current > wanted

    def _increase(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            self._change(index, group, min(float(group["lr"]) / self.factor, self.max_lrs[index]), upwards=True)
        self.reset_start = self.reset_after
        self.warmup_counter, self.num_good_epochs = self.warmup, 0

    def _reduce(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            self._change(index, group, max(float(group["lr"]) * self.factor, self.min_lrs[index]), upwards=False)
        if all(rate <= low for rate, low in zip(_rates(self.optimizer), self.min_lrs, strict=True)):
            self.reset_start -= 1
            if self.reset_start <= 0:
                self._begin()
                for group, rate in zip(self.optimizer.param_groups, self.first_rates, strict=True):
                    _set_rate(group, rate)
        self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def _change(self, index: int, group: dict[str, Any], rate: float, *, upwards: bool) -> None:
        difference = rate - float(group["lr"])
        if (difference if upwards else -difference) > self.eps:
            _set_rate(group, rate)
            if self.verbose:
                print(f"Evaluation {self.last_epoch}: learning rate of group {index} is now {rate:.4e}.")

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group."""
        return _rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What changes over a run, rates included; the arguments are those of the run that loads it."""
        return {
            **{name: getattr(self, name) for name in self._KEPT},
            "window": list(self.window),
            "window_sum": self.window_sum,
            "first_rates": list(self.first_rates),
            "rates": self.get_last_lr(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave."""
        for name in (*self._KEPT, "window_sum"):
            setattr(self, name, state_dict[name])
        self.window, self.first_rates = list(state_dict["window"]), list(state_dict["first_rates"])
        for group, rate in zip(self.optimizer.param_groups, state_dict["rates"], strict=True):
            _set_rate(group, rate)

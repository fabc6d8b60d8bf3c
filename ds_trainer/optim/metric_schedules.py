"""Schedules that follow a metric: stepped with its value after each evaluation.

Both keep their full state, including the learning rates, in plain numbers, so a resumed run continues with the same
learning rates regardless of the optimizer's state.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ds_trainer.utils.errors import ConfigError

Mode = Literal["min", "max"]
ThresholdMode = Literal["rel", "abs"]


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # some optimizers keep it in a tensor and reject anything else
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class PlateauSchedule(ReduceLROnPlateau):
    """torch's ReduceLROnPlateau, whose state also restores the learning rates.

    Raises:
        ValueError: torch rejects an argument.
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
        super().__init__(
            optimizer, mode, factor, patience, threshold, threshold_mode, cooldown=cooldown, min_lr=min_lr, eps=eps
        )

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rate of each parameter group."""
        return _rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state, including the learning rates."""
        return {**super().state_dict(), "_last_lr": _rates(self.optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a result of :meth:`state_dict`, including the learning rates."""
        super().load_state_dict(state_dict)
        for group, rate in zip(self.optimizer.param_groups, state_dict["_last_lr"], strict=True):
            _set_rate(group, rate)


def greedy_schedule_class() -> type:
    """The class of ``lr_scheduler_type=greedy``: transformers' ``GreedyLR``, with a state that fits our checkpoints.

    It raises the learning rate while a metric keeps improving, and lowers it while it does not. Two things differ from
    the base class: learning rates in tensors are updated in place, and ``state_dict`` holds only what changes during a
    run, so a resumed run uses its own arguments.

    Source: GreedyLR, https://arxiv.org/abs/2512.14527.

    Raises:
        ConfigError: transformers is not installed, or too old to have the class.
    """
    try:
        from transformers.optimization import GreedyLR, StreamingAverage
    except ImportError as error:
        raise ConfigError(
            f"lr_scheduler_type=greedy uses GreedyLR of transformers, which cannot be imported: {error}. Run "
            "pip install 'ds-trainer[hf]', or choose another lr_scheduler_type."
        ) from error

    class GreedySchedule(GreedyLR):
        """``GreedyLR`` over an optimizer."""

        _COUNTERS = (
            "best",
            "cooldown_counter",
            "last_epoch",
            "num_bad_epochs",
            "num_good_epochs",
            "reset_start",
            "warmup_counter",
        )

        _streaming_avg: Any

        def __init__(self, optimizer: Optimizer, **arguments: Any) -> None:
            super().__init__(optimizer, **arguments)
            self._init_lrs = _rates(optimizer)

        def step(self, metrics: float, epoch: int | None = None) -> None:
            """Adjusts the learning rates after an evaluation with this metric."""
            before = [group["lr"] for group in self.optimizer.param_groups]
            super().step(metrics, epoch)
            for group, rate in zip(self.optimizer.param_groups, before, strict=True):
                if group["lr"] is not rate and isinstance(rate, torch.Tensor):
                    group["lr"] = rate.fill_(group["lr"])

        def get_last_lr(self) -> list[float]:
            """The learning rate of each parameter group."""
            return _rates(self.optimizer)

        def state_dict(self) -> dict[str, Any]:
            """The values that change during a run, including the learning rates."""
            average = self._streaming_avg
            return {
                **{name: getattr(self, name) for name in self._COUNTERS},
                "window": [] if average is None else list(average.values),
                "window_sum": 0.0 if average is None else average.sum,
                "first_rates": list(self._init_lrs),
                "rates": self.get_last_lr(),
            }

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Restores a result of :meth:`state_dict`."""
            for name in self._COUNTERS:
                setattr(self, name, state_dict[name])
            self._init_lrs = list(state_dict["first_rates"])
            if self._streaming_avg is not None:
                self._streaming_avg = StreamingAverage(self.window_size)
                self._streaming_avg.values = list(state_dict["window"])
                self._streaming_avg.sum = state_dict["window_sum"]
            for group, rate in zip(self.optimizer.param_groups, state_dict["rates"], strict=True):
                _set_rate(group, rate)

    return GreedySchedule

"""The bias correction of DeepSpeed's CPUAdam after its states were replaced.

Its C++ object multiplies ``beta ** step`` up from step to step, in float32, and calls ``pow`` where the step is not
the next one (``csrc/includes/cpu_adam.h``, ``IncrementStep``). The two differ in the last bits, so a resumed run would
leave the trajectory of the uninterrupted one. The steps are therefore repeated on tensors without elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ds_trainer.engine.state.flat_partitions import FlatPartition

_EPSILON = 2.0**-26  # below it, 1 - beta ** step is 1 in float32


def restore_bias_corrections(partitions: Iterable[FlatPartition]) -> None:
    """Call it when the states of ``partitions`` have been replaced; other optimizers are left alone."""
    steps: dict[int, set[int]] = {}
    optimizers: dict[int, Any] = {}
    for partition in partitions:
        if hasattr(partition.optimizer, "ds_opt_adam") and "step" in partition.states:
            optimizers[id(partition.optimizer)] = partition.optimizer
            counters = [one.scalars["step"] for one in partition.histories or () if one.began]
            numbers = steps.setdefault(id(partition.optimizer), set())
            numbers.update(int(counter) for counter in counters or [partition.states["step"]])
    for key, optimizer in optimizers.items():
        if len(steps[key]) == 1:  # else every parameter's step differs from the one before, and ``pow`` is called
            _repeat_steps(optimizer, *steps[key])


def _repeat_steps(optimizer: Any, steps: int) -> None:
    nothing = [torch.empty(0) for _ in range(4)]
    groups = optimizer.param_groups
    beta = max(beta for group in groups for beta in group["betas"])
    needed = math.ceil(math.log(_EPSILON) / math.log(beta)) if beta > 0 else 1
    for step in range(1, min(steps, needed) + 1):
        for group in groups:
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id,
                step,
                group["lr"],
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                group["bias_correction"],
                *nothing,
            )

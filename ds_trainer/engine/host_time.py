"""Work of DeepSpeed, at every ZeRO stage, that has no effect. Left out, once for the process.

Source: DeepSpeed 0.19.8.

* ``utils/nvtx.py``: two NVTX ranges for each decorated function, thousands in a pass of ZeRO-3, whether or not a tool
  reads them.
* ``runtime/utils.py`` (``count_used_parameters_in_backward``): a view and a change of the gradient mode for each
  parameter, to find its node in the graph. One function of all parameters has all of these nodes as neighbors.
* ``runtime/engine.py`` (``_check_for_duplicates``): at creation, two lists of all parameters for each parameter; with
  the 18,900 tensors of a mixture that does not stack its experts, about 27 s.
* ``accelerator/cpu_accelerator.py``: on CPUs, a process that runs ``numactl`` for each bucket of gradients, to count
  devices.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_TOOLS = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
"""NVTX loads a tool (Nsight Systems, Nsight Compute) from the library that one of these names; else it does nothing."""


def spare_host_time() -> None:
    """Leaves that work out. Idempotent."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = any(os.environ.get(name) for name in _TOOLS)
    for owner in (stage3, stage_1_and_2):
        owner.count_used_parameters_in_backward = used_in_backward
    DeepSpeedEngine._check_for_duplicates = check_for_duplicates
    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cpu" and "device_count" not in vars(accelerator):
        accelerator.device_count = cache(accelerator.device_count)


def used_in_backward(parameters: Sequence[torch.nn.Parameter]) -> int:
    """How many of ``parameters`` the running backward pass computes a gradient of."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return 0
    with torch.enable_grad():
        joined = _Neighbors.apply(*trained)  # torch 2.12 frees its node with it
    nodes = {node for node, _ in joined.grad_fn.next_functions}
    return sum(map(torch._C._will_engine_execute_node, nodes))


def check_for_duplicates(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Takes the place of ``DeepSpeedEngine._check_for_duplicates``.

    Raises:
        AssertionError: a parameter of the engine's module is in ``optimizer`` twice.
    """
    times = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    for name, parameter in engine.module.named_parameters():
        assert times[id(parameter)] <= 1, (
            f"Parameter with name: {name} occurs multiple times in optimizer.param_groups. Make sure it only appears "
            "once to prevent undefined behavior."
        )


class _Neighbors(torch.autograd.Function):
    """Its node in the graph has those of all inputs as neighbors. It is never run backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

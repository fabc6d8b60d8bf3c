"""What DeepSpeed 0.19.8 does not do about the types in which gradients are summed.

**Accumulation in float32 without ZeRO.** It refuses ``data_types.grad_accum_dtype: fp32`` at stage 0. So it is not told
of it, and the parameters take float32 gradients instead (``Tensor.grad_dtype``): autograd adds every micro-batch in
float32, and DeepSpeed reduces and steps what it finds. ZeRO 1, 2 and 3 accumulate by themselves.

**Reduction after autocast.** That an engine of this process used autocast stays in a global, and every later one at
ZeRO 1 to 3 would reduce in the type of its weights, whatever ``communication_data_type`` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig

_ACCUMULATE = "grad_accum_dtype"


def accumulates_here(config: CompiledConfig) -> bool:
    """Whether gradients are wider than the weights, at the stage where DeepSpeed does not do it."""
    return (
        config.get("zero_optimization.stage") == 0
        and bool(config.get("bf16.enabled"))
        and config.get(f"data_types.{_ACCUMULATE}") in ("fp32", "float32", "torch.float32")
    )


def told_to_deepspeed(config: CompiledConfig) -> dict[str, Any]:
    """``config`` for ``deepspeed.initialize``, without what is done here."""
    told = config.to_dict()
    if accumulates_here(config):
        told["data_types"] = {key: value for key, value in told["data_types"].items() if key != _ACCUMULATE}
    return told


def forget_autocast(model: nn.Module) -> None:
    """Before an engine is built: what an earlier one left in DeepSpeed and on the parameters of ``model``."""
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    for parameter in model.parameters():
        vars(parameter).pop(torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME, None)


def keep_reduction_dtype(optimizer: Any, autocast: bool) -> None:
    """Let ``optimizer``, as DeepSpeed wraps it, reduce as it was built, whatever engines are built after it."""
    from deepspeed.runtime.torch_autocast import get_comm_dtype

    if hasattr(optimizer, "get_param_comm_dtype"):
        by_configuration = lambda parameter: optimizer.communication_data_type  # noqa: E731
        optimizer.get_param_comm_dtype = get_comm_dtype if autocast else by_configuration


class Float32Accumulation:
    """Gradients of a bf16 ``model`` are float32 from now on. It has none yet."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._set(torch.float32)

    def _set(self, dtype: torch.dtype) -> None:
        for parameter in self._parameters:
            parameter.grad = None
            parameter.grad_dtype = dtype

    def complete(self) -> None:
        """Before the last micro-batch: parameters that no other one used get zeros; DeepSpeed's would be in bf16."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)

    def close(self) -> None:
        """Give gradients the type of the weights again."""
        self._set(torch.bfloat16)

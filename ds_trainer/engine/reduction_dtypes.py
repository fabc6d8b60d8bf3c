"""The dtypes in which gradients are accumulated and reduced, where DeepSpeed 0.19.8 needs help.

**Accumulation in float32 without ZeRO.** DeepSpeed rejects ``data_types.grad_accum_dtype: fp32`` at stage 0. So the key
is removed from its configuration, and the parameters get float32 gradients (``Tensor.grad_dtype``): autograd adds every
micro-batch in float32, and DeepSpeed reduces and applies those gradients. ZeRO 1, 2 and 3 implement it themselves.

**Reduction after autocast.** DeepSpeed records the use of autocast in a global, so every later engine of the process at
ZeRO 1 to 3 would reduce in the dtype of its weights and ignore ``communication_data_type``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig

_ACCUMULATE = "grad_accum_dtype"


def accumulates_in_float32(config: CompiledConfig) -> bool:
    """Whether we accumulate bf16 gradients in float32: at stage 0, where DeepSpeed does not."""
    return config.zero_stage == 0 and config.precision.dtype == "bf16" and config.accumulation_dtype == "fp32"


def deepspeed_settings(config: CompiledConfig) -> dict[str, Any]:
    """``config`` for ``deepspeed.initialize``, without the keys that are handled here."""
    settings = config.to_dict()
    if accumulates_in_float32(config):
        settings["data_types"] = {key: value for key, value in settings["data_types"].items() if key != _ACCUMULATE}
    return settings


def reset_autocast(model: nn.Module) -> None:
    """Removes an earlier engine's autocast settings from DeepSpeed and from the parameters of ``model``.

    Called before an engine is built.
    """
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    for parameter in model.parameters():
        vars(parameter).pop(torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME, None)


def keep_reduction_dtype(optimizer: Any, autocast: bool) -> None:
    """Makes ``optimizer``, DeepSpeed's wrapper, keep its reduction dtype when other engines are built later."""
    from deepspeed.runtime.torch_autocast import get_comm_dtype

    if hasattr(optimizer, "get_param_comm_dtype"):
        by_configuration = lambda parameter: optimizer.communication_data_type  # noqa: E731
        optimizer.get_param_comm_dtype = get_comm_dtype if autocast else by_configuration


class Float32Accumulation:
    """Makes the gradients of a bf16 ``model`` float32. The model has no gradients yet."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._set(torch.float32)

    def _set(self, dtype: torch.dtype) -> None:
        for parameter in self._parameters:
            parameter.grad = None
            parameter.grad_dtype = dtype

    def complete(self) -> None:
        """Before the last micro-batch: fills missing gradients with zeros; DeepSpeed's zeros would be bf16."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)

    def close(self) -> None:
        """Restores the dtype of the weights for gradients."""
        self._set(torch.bfloat16)

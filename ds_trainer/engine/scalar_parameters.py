"""Lets DeepSpeed train zero-dimensional parameters: CLIP's ``logit_scale``, a learned temperature.

DeepSpeed 0.19.8 broadcasts parameters as bytes with ``p.data.view(torch.uint8)``, which torch rejects for a
zero-dimensional tensor ("self.dim() cannot be 0 to view Float as Byte"): when an engine is constructed
(``runtime/engine.py``), and under ZeRO-3 when a parameter is sharded and when ``GatheredParameters(modifier_rank=...)``
exits (``runtime/zero/partition_parameters.py``). The rest of DeepSpeed flattens its tensors, so it is not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ScalarsAsBytes(TorchFunctionMode):
    """Inside, a zero-dimensional tensor is viewed as bytes like a vector of one element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.view and args[1:] == (torch.uint8,) and args[0].dim() == 0:
            args = (args[0].reshape(1), torch.uint8)
        return func(*args, **(kwargs or {}))


def allow_scalar_parameters() -> None:
    """Lets DeepSpeed broadcast zero-dimensional parameters. Idempotent."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    for owner, name in (
        (DeepSpeedEngine, "_broadcast_model"),
        (Init, "_zero_init_param"),
        (GatheredParameters, "_exit"),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "allows_scalars"):
            setattr(owner, name, _admitting(original))


def _admitting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def admitting(*args: Any, **kwargs: Any) -> Any:
        with ScalarsAsBytes():
            return original(*args, **kwargs)

    admitting.allows_scalars = True  # type: ignore[attr-defined]
    return admitting

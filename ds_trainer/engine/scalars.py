"""Lets DeepSpeed train parameters without dimensions: CLIP's ``logit_scale``, a learned temperature.

DeepSpeed 0.19.8 broadcasts parameters as bytes, by ``p.data.view(torch.uint8)``, which torch refuses for a tensor
without dimensions ("self.dim() cannot be 0 to view Float as Byte"): when an engine is made (``runtime/engine.py``), and
under ZeRO-3 when a parameter is sharded and when ``GatheredParameters(modifier_rank=...)`` is left
(``runtime/zero/partition_parameters.py``). Nothing else in it depends on dimensions: it flattens what it works on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ScalarsAsBytes(TorchFunctionMode):
    """Inside, a tensor without dimensions is viewed as bytes like a vector with one element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.view and args[1:] == (torch.uint8,) and args[0].dim() == 0:
            args = (args[0].reshape(1), torch.uint8)
        return func(*args, **(kwargs or {}))


def admit_scalars() -> None:
    """Let DeepSpeed broadcast parameters without dimensions. May be called again."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    for owner, name in (
        (DeepSpeedEngine, "_broadcast_model"),
        (Init, "_zero_init_param"),
        (GatheredParameters, "_exit"),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "admits_scalars"):
            setattr(owner, name, _admitting(original))


def _admitting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def admitting(*args: Any, **kwargs: Any) -> Any:
        with ScalarsAsBytes():
            return original(*args, **kwargs)

    admitting.admits_scalars = True  # type: ignore[attr-defined]
    return admitting

"""Evaluation with weights in half precision (``bf16_full_eval``, ``fp16_full_eval``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.weights import HALF_TYPES
from ds_trainer.utils.errors import ConfigError


def half_precision_of(args: TrainingArguments) -> str | None:
    """``"bf16"`` or ``"fp16"`` if evaluation is to run in it, else None."""
    return "bf16" if args.bf16_full_eval else "fp16" if args.fp16_full_eval else None


@contextmanager
def weights_cast_to(half: str | None, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Cast floating-point weights and buffers of ``model`` to ``half`` on ``device`` inside; restore them afterwards.

    The original tensors stay where they are, so a model in host memory takes half its size on the device.
    Floating-point inputs are cast too. With None nothing happens.

    Raises:
        ConfigError: the weights are sharded (ZeRO-3) in another precision.
    """
    if half is None:
        yield
        return
    dtype = HALF_TYPES[half]
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    if any(hasattr(tensor, "ds_id") and tensor.dtype != dtype for tensor in tensors):
        raise ConfigError(
            f"{half}_full_eval=True after training with ZeRO-3 in another precision: the weights are sharded and "
            f"cannot be cast for one evaluation. Train with {half}=True, evaluate before training, or set "
            f"{half}_full_eval to False."
        )
    before = [tensor.data for tensor in tensors]

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    hook = model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        yield
    finally:
        hook.remove()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.data = old

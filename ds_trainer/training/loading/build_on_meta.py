"""Builds transformers models without weights: parameters on meta, buffers computed by the model's code."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.utils.errors import ConfigError


def build_on_meta(model_class: Any, config: Any, dtype: torch.dtype, **keywords: Any) -> Any:
    """Returns the model of ``config``, in evaluation mode as from ``from_pretrained``. Parameters take no memory.

    Args:
        model_class: an auto class or a model class.
        config: the configuration; its ``dtype`` is set.
        dtype: dtype of the parameters, except those that the class keeps in float32.
        keywords: arguments of the class (``trust_remote_code``).

    Raises:
        ConfigError: the class cannot be built without weights.
    """
    from transformers import initialization
    from transformers.modeling_utils import set_zero3_state

    make = getattr(model_class, "from_config", None) or model_class._from_config
    with ExitStack() as stack:
        stack.enter_context(set_zero3_state())  # no zero.Init, even if a script has enabled it in transformers
        stack.enter_context(initialization.no_init_weights())
        # Not recorded: `_init_weights` of the model suffices, and PEFT swaps parameters, which recording forbids.
        model = empty_model(lambda: make(config, dtype=dtype, **keywords), recorded=False)
    model.tie_weights()  # part of the initialization
    _keep_float32(model, dtype)
    return model.eval()


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Apply transformers' dtype plan: some classes keep parameters in float32 (``wo`` of T5 in fp16)."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    patterns, names, _ = build_glob_alternation(list(plan))
    float32_parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        match = patterns.search(name)
        if match is not None and match.lastgroup is not None:
            data = torch.empty_like(parameter, dtype=plan[names[match.lastgroup]])
            float32_parameters[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = float32_parameters.get(id(parameter), parameter)


def resolve_dtype(requested: Any, config: Any, dtype_in_files: Any) -> torch.dtype:
    """Returns the dtype of the parameters: ``requested``, else that of the configuration, else that of the files.

    Args:
        requested: a dtype, its name, ``"auto"`` or None.
        config: the configuration.
        dtype_in_files: returns the dtype of the first floating-point tensor in the files, or None.

    Raises:
        ConfigError: it is not a floating-point dtype of torch.
    """
    if requested in (None, "auto"):
        requested = getattr(config, "dtype", None) or dtype_in_files() or torch.float32
    if isinstance(requested, str):
        dtype = getattr(torch, requested.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype={requested!r} is not a torch dtype. Use bfloat16, float16, float32 or auto.")
        requested = dtype
    if not isinstance(requested, torch.dtype) or not requested.is_floating_point:
        raise ConfigError(f"dtype={requested!r} cannot be trained. Use bfloat16, float16 or float32.")
    return requested

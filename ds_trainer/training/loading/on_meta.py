"""A model of transformers without its weights: parameters on meta, buffers with the values that the code gives them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.utils.errors import ConfigError


def build_on_meta(model_class: Any, config: Any, dtype: torch.dtype, **keywords: Any) -> Any:
    """The model of ``config``, in evaluation mode as ``from_pretrained`` gives it. Takes no memory for parameters.

    Args:
        model_class: an auto class or a model class.
        config: the configuration; gets the ``dtype``.
        dtype: of the parameters, but for those that the class keeps in float32.
        keywords: for the class (``trust_remote_code``).

    Raises:
        ConfigError: the class cannot be built without its weights.
    """
    from transformers import initialization
    from transformers.modeling_utils import set_zero3_state

    make = getattr(model_class, "from_config", None) or model_class._from_config
    with ExitStack() as stack:
        stack.enter_context(set_zero3_state())  # no zero.Init, also where a script has asked transformers for it
        stack.enter_context(initialization.no_init_weights())
        # Not recorded: `_init_weights` of the model says it all, and PEFT swaps parameters, which a record forbids.
        model = empty_model(lambda: make(config, dtype=dtype, **keywords), recorded=False)
    model.tie_weights()  # a part of the initialization
    _keep_float32(model, dtype)
    return model.eval()


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Parameters that the class keeps in float32 beside a half type (``wo`` of T5 in fp16), by transformers' plan."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    patterns, names, _ = build_glob_alternation(list(plan))
    kept: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        match = patterns.search(name)
        if match is not None and match.lastgroup is not None:
            data = torch.empty_like(parameter, dtype=plan[names[match.lastgroup]])
            kept[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = kept.get(id(parameter), parameter)


def dtype_of(asked: Any, config: Any, first_of_file: Any) -> torch.dtype:
    """The type of the parameters: the one ``asked`` for, else the configuration's, else the file's.

    Args:
        asked: a type, its name, ``"auto"`` or None.
        config: the configuration.
        first_of_file: ``f()`` gives the type of the first tensor in the file that holds fractions; None without one.
    """
    if asked in (None, "auto"):
        asked = getattr(config, "dtype", None) or first_of_file() or torch.float32
    if isinstance(asked, str):
        found = getattr(torch, asked.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"dtype={asked!r} is no type of torch. Use bfloat16, float16, float32 or auto.")
        asked = found
    if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
        raise ConfigError(f"dtype={asked!r}: weights are trained as bfloat16, float16 or float32.")
    return asked

"""Loads models that bitsandbytes quantizes to 4 or 8 bits, whole, on the device of each rank, with transformers.

Quantized values are stored in blocks with one scale each, so a rank cannot read a part of a tensor. Below ZeRO stage 3
each rank holds the whole base anyway, at half a byte or one byte per weight.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ds_trainer.checkpoint.loading.file_weights import ShapeMismatch
from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.training.loading.load_request import LoadRequest
from ds_trainer.training.loading.missing_weights import check_missing_weights
from ds_trainer.utils.errors import ConfigError, did_you_mean

_SHORTCUTS = ("load_in_4bit", "load_in_8bit")
_METHOD = "bitsandbytes"


def pop_quantization(name: str, overrides: dict[str, Any]) -> Any:
    """Removes the quantization from ``overrides`` and returns its transformers configuration; None if there is none.

    Raises:
        ConfigError: it is not a bitsandbytes configuration.
    """
    requested = overrides.pop("quantization_config", None)
    shortcuts = {key: overrides.pop(key) for key in _SHORTCUTS if key in overrides}
    if requested is None and any(shortcuts.values()):
        requested = {"quant_method": _METHOD, **shortcuts}
    if requested is not None:
        _check(name, requested)
    if not isinstance(requested, Mapping):
        return requested
    from transformers import BitsAndBytesConfig

    values = {key: value for key, value in requested.items() if key != "quant_method"}
    fields = [field for field in inspect.signature(BitsAndBytesConfig).parameters if field != "kwargs"]
    unknown = [
        f"{name}: quantization_config: {key!r} is not a field of BitsAndBytesConfig.{did_you_mean(key, fields)}"
        for key in values
        if key not in fields
    ]
    if unknown:
        raise ConfigError(unknown)
    return BitsAndBytesConfig(**values)


def is_quantized(name: str, config: Any) -> bool:
    """Whether the files of a model with this configuration are quantized.

    Raises:
        ConfigError: they are quantized by another method than bitsandbytes.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        _check(name, quantization)
    return quantization is not None


def load_quantized(request: LoadRequest, quantization: Any, device: torch.device | None) -> Any:
    """Loads a model whose weights are quantized, or are quantized as they are read.

    Args:
        request: the model to load; its dtype applies to weights that are not quantized.
        quantization: the quantization configuration; None if the files are quantized.
        device: where the model is loaded; None for the current GPU, or the CPU if there is none.

    Raises:
        ConfigError: weights are missing, or cannot be quantized.
    """
    from transformers.modeling_utils import set_zero3_state

    keywords: dict[str, Any] = {"key_mapping": dict(request.key_mapping)} if request.key_mapping else {}
    keywords |= {} if quantization is None else {"quantization_config": quantization}
    keywords |= {} if device is None else {"device_map": {"": device}}
    keywords |= {"trust_remote_code": True} if request.trust_remote_code else {}
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        # Without ZeRO-3, even if a script has enabled it in transformers; the stage of the engine is checked later.
        with set_zero3_state(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(request.seed)
            model, loading_info = request.model_class().from_pretrained(
                str(request.directory),
                config=request.config,
                dtype=request.weight_dtype(stored_tensors(request.directory)),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **keywords,
            )
    except (ImportError, ValueError, RuntimeError) as error:
        message = " ".join(str(error).split())[:400]
        raise ConfigError(f"{request.name} cannot be loaded quantized: {message}") from error
    parameters = {name for name, _ in model.named_parameters()}
    check_missing_weights(
        [name for name in loading_info["missing_keys"] if name in parameters],
        [ShapeMismatch(name, tuple(a), tuple(b)) for name, a, b in loading_info["mismatched_keys"]],
        loading_info["unexpected_keys"],
        request.allow_new_weights,
        request.directory,
        type(model).__name__,
    )
    model.config.name_or_path = model.name_or_path = request.name
    return model


def _check(name: str, quantization: Any) -> None:
    method = _field(quantization, "quant_method")
    method = str(getattr(method, "value", method) or _METHOD)
    if method != _METHOD:
        raise ConfigError(
            f"{name} is quantized by {method}, but adapters can only be trained on a base that bitsandbytes quantizes "
            "to 4 or 8 bits. Pass the unquantized model; to train adapters on 4 bits, add "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True) of transformers."
        )
    if not any(_field(quantization, key) or _field(quantization, f"_{key}") for key in _SHORTCUTS):
        raise ConfigError(f"{name}: quantization_config sets neither load_in_4bit nor load_in_8bit. Set one of them.")
    if importlib.util.find_spec(_METHOD) is None:
        raise ConfigError(f"{name}: 4-bit and 8-bit weights require bitsandbytes: pip install bitsandbytes.")


def _field(quantization: Any, key: str) -> Any:
    return quantization.get(key) if isinstance(quantization, Mapping) else getattr(quantization, key, None)

"""Models that bitsandbytes quantizes to 4 or 8 bits: loaded by transformers, whole, on the device of each rank.

Their numbers belong together in blocks with a scale each, so that no rank could read a part of a tensor. Below ZeRO
stage 3 each rank holds the whole base anyway, of half a byte or one byte a weight.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.file_weights import Mismatch
from ds_trainer.training.loading.new_weights import new_names
from ds_trainer.utils.errors import ConfigError, did_you_mean

_SHORT = ("load_in_4bit", "load_in_8bit")
_METHOD = "bitsandbytes"


def taken_quantization(name: str, overrides: dict[str, Any]) -> Any:
    """What ``overrides`` ask for, taken out of them: a configuration of transformers; None for nothing.

    Raises:
        ConfigError: it is none of bitsandbytes.
    """
    asked = overrides.pop("quantization_config", None)
    short = {key: overrides.pop(key) for key in _SHORT if key in overrides}
    if asked is None and any(short.values()):
        asked = {"quant_method": _METHOD, **short}
    if asked is not None:
        _check(name, asked)
    if not isinstance(asked, Mapping):
        return asked
    from transformers import BitsAndBytesConfig

    values = {key: value for key, value in asked.items() if key != "quant_method"}
    fields = [field for field in inspect.signature(BitsAndBytesConfig).parameters if field != "kwargs"]
    unknown = [
        f"{name}: quantization_config: {key!r} is no field of BitsAndBytesConfig.{did_you_mean(key, fields)}"
        for key in values
        if key not in fields
    ]
    if unknown:
        raise ConfigError(unknown)
    return BitsAndBytesConfig(**values)


def is_quantized(name: str, config: Any) -> bool:
    """Whether the files of a model with this configuration are quantized.

    Raises:
        ConfigError: by something else than bitsandbytes.
    """
    present = getattr(config, "quantization_config", None)
    if present is not None:
        _check(name, present)
    return present is not None


def load_quantized(
    model_class: Any,
    directory: Path,
    name: str,
    config: Any,
    quantization: Any,
    *,
    dtype: torch.dtype,
    device: torch.device | None,
    allow_new_weights: Sequence[str] | bool,
    key_mapping: Mapping[str, str] | None,
    seed: int,
    trust_remote_code: bool,
) -> Any:
    """The model in ``directory`` with its weights, which are quantized as they are read.

    Args:
        model_class: an auto class or a model class of transformers.
        directory: of its files.
        name: of the model, for messages.
        config: its configuration.
        quantization: how; None where the files are quantized.
        dtype: of the weights that are not quantized.
        device: where it is loaded; None for the current GPU, or the CPU.
        allow_new_weights: patterns of the names that the files may lack.
        key_mapping: as transformers has it.
        seed: of new weights.
        trust_remote_code: as transformers has it.

    Raises:
        ConfigError: weights are missing, or cannot be quantized.
    """
    from transformers.modeling_utils import set_zero3_state

    keywords: dict[str, Any] = {"key_mapping": dict(key_mapping)} if key_mapping else {}
    keywords |= {} if quantization is None else {"quantization_config": quantization}
    keywords |= {} if device is None else {"device_map": {"": device}}
    keywords |= {"trust_remote_code": True} if trust_remote_code else {}
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        # Below stage 3, also where a script has told transformers of it: what is asked of the engine is checked later.
        with set_zero3_state(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            model, found = model_class.from_pretrained(
                str(directory),
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **keywords,
            )
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be loaded quantized: {' '.join(str(error).split())[:400]}") from error
    parameters = {key for key, _ in model.named_parameters()}
    new_names(
        [key for key in found["missing_keys"] if key in parameters],
        [Mismatch(key, tuple(stored), tuple(there)) for key, stored, there in found["mismatched_keys"]],
        found["unexpected_keys"],
        allow_new_weights,
        directory,
        type(model).__name__,
    )
    model.config.name_or_path = model.name_or_path = name
    return model


def _check(name: str, quantization: Any) -> None:
    method = _of(quantization, "quant_method")
    method = str(getattr(method, "value", method) or _METHOD)
    if method != _METHOD:
        raise ConfigError(
            f"{name}: quantized by {method}: adapters are trained on bases that bitsandbytes quantizes to 4 or 8 bits. "
            "Name the model that was not quantized; to train adapters on 4 bits, add "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True) of transformers."
        )
    if not any(_of(quantization, key) or _of(quantization, f"_{key}") for key in _SHORT):
        raise ConfigError(f"{name}: quantization_config asks for neither load_in_4bit nor load_in_8bit. Set one.")
    if importlib.util.find_spec(_METHOD) is None:
        raise ConfigError(f"{name}: weights of 4 and 8 bits need bitsandbytes: pip install bitsandbytes.")


def _of(quantization: Any, key: str) -> Any:
    return quantization.get(key) if isinstance(quantization, Mapping) else getattr(quantization, key, None)

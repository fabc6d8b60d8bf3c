"""``from_pretrained``: builds a model on meta from a directory or Hub name and attaches its weight source."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.file_weights import ShapeMismatch, open_weights
from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.engine.loading.new_weights import NewWeights
from ds_trainer.engine.loading.weight_source import (
    ChainedSource,
    WeightSource,
    attach_weight_source,
    attached_weight_source,
)
from ds_trainer.training.loading.build_on_meta import build_on_meta, resolve_dtype
from ds_trainer.training.loading.load_request import LoadRequest
from ds_trainer.training.loading.missing_weights import check_missing_weights
from ds_trainer.training.loading.model_class import resolve_model_class
from ds_trainer.training.loading.model_files import ADAPTER_CONFIG, model_directory
from ds_trainer.training.loading.peft_adapters import AdapterDirectory, add_adapters, load_adapters
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import user_path


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    auto_class: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    config: Any = None,
    peft_config: Any = None,
    allow_new_weights: Sequence[str] | bool = (),
    key_mapping: Mapping[str, str] | None = None,
    seed: int = 42,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    subfolder: str = "",
    device: torch.device | None = None,
    **config_overrides: Any,
) -> Any:
    """Builds a transformers model without loading its weights; each rank later reads only its own shards.

    The parameters are on the meta device. The engine of a :class:`ds_trainer.Trainer` turns them into shards one at a
    time and reads each shard from the files at that moment. Until then the model takes no memory.

    A model that bitsandbytes quantizes to 4 or 8 bits (``quantization_config``, ``load_in_4bit``, or quantized files)
    is loaded immediately and whole; with ``peft_config`` it can be trained below ZeRO stage 3.

    Args:
        name_or_path: a directory with ``config.json`` and weights (safetensors or ``.bin``), or a Hub name, which is
            first downloaded to the cache. A directory of PEFT adapters (``adapter_config.json``) is also a model: the
            base with the adapters, to continue training them.
        auto_class: the transformers class to build, or its name (``"AutoModelForSequenceClassification"``); default:
            the class that the configuration names (``architectures``).
        dtype: dtype of the weights; default: that of the configuration or the files. The precision of training is set
            by the training arguments (``bf16``, ``fp16``).
        config: a configuration, which is not modified, or the path of one; default: that of ``name_or_path``.
        peft_config: a PEFT configuration; adds new adapters to the model.
        allow_new_weights: patterns of names that the files may lack (``"classifier.*"``); True for any. These weights
            are initialized as the model initializes them.
        key_mapping: regular expressions of names in the files and their replacements, as in transformers.
        seed: seed of all newly initialized weights.
        revision, token, cache_dir, local_files_only, subfolder, trust_remote_code: as in transformers.
        device: where quantized weights are loaded; default: the current GPU, or the CPU if there is none.
        config_overrides: fields of the configuration (``num_labels=3``, ``attn_implementation="sdpa"``).

    Raises:
        ConfigError: there is no such model, or its files do not fit it; the message says what to change.
    """
    name = os.fspath(name_or_path)
    dtype = config_overrides.pop("torch_dtype", None) if dtype is None else dtype
    _check_overrides(name, config_overrides)
    quantization = pop_quantization(name, config_overrides)
    _check_patterns(name, key_mapping)
    hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    directory = model_directory(name, revision=revision, subfolder=subfolder, **hub)  # type: ignore[arg-type]
    shared = {"dtype": dtype, "key_mapping": key_mapping, "seed": seed, "trust_remote_code": trust_remote_code, **hub}
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file():
        if peft_config is not None:
            raise ConfigError(
                f"{name} contains adapters ({ADAPTER_CONFIG}), but peft_config requests new ones. Remove peft_config "
                "to continue training the saved adapters, or pass the base model."
            )
        saved = AdapterDirectory.of(directory)
        of_base = {"config": config, "allow_new_weights": saved.allowing(allow_new_weights), **config_overrides}
        of_base |= {"quantization_config": quantization, "device": device}
        base = from_pretrained(saved.base, auto_class or saved.auto_class, **shared, **of_base)  # type: ignore[arg-type]
        model, source = load_adapters(base, attached_weight_source(base), directory)
    else:
        config = read_config(config, directory, name, trust_remote_code, config_overrides)
        request = LoadRequest(
            name=name,
            directory=directory,
            config=config,
            auto_class=auto_class,
            dtype=dtype,
            allow_new_weights=allow_new_weights,
            key_mapping=key_mapping,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        source = None
        if is_quantized(name, config) or quantization is not None:
            model = load_quantized(request, quantization, device)
        else:
            model, source = _load_from_files(request)
        if peft_config is not None:
            model, source = add_adapters(model, source, peft_config, seed)
    if source is not None:
        attach_weight_source(model, source)
    return model


def from_config(
    config: Any,
    auto_class: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    peft_config: Any = None,
    seed: int = 42,
) -> Any:
    """Builds a new model of the architecture ``config`` on meta; its weights are initialized shard by shard.

    Args:
        config: a transformers configuration.
        auto_class: the class or its name; default: the class that ``config`` names.
        dtype: dtype of the weights; default: that of ``config``, else float32.
        peft_config: a PEFT configuration; adds adapters.
        seed: seed of the weights; together with a tensor's name it determines every value.

    Raises:
        ConfigError: the class is unknown.
    """
    where = f"the {type(config).__name__} that was passed as the model"
    model_class = resolve_model_class(config, auto_class, where)
    model = build_on_meta(model_class, config, resolve_dtype(dtype, config, lambda: None))
    source: WeightSource = NewWeights(model, seed)
    if peft_config is not None:
        model, source = add_adapters(model, source, peft_config, seed)
    attach_weight_source(model, source)
    return model


def read_config(config: Any, directory: Path, name: str, trust_remote_code: bool, overrides: Mapping[str, Any]) -> Any:
    """Returns the configuration of the model in ``directory``, with ``overrides``. A given ``config`` is copied.

    Raises:
        ConfigError: it cannot be read, or lacks a field of ``overrides``.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        config = copy.deepcopy(config)
        unused = [key for key in overrides if not hasattr(config, key)]
        for key in overrides.keys() - set(unused):
            setattr(config, key, overrides[key])
    else:
        path = directory if config is None else user_path(config, f"The configuration {config!s}")
        if not (path / "config.json").is_file() and not path.is_file():
            subfolders = sorted(file.parent.name for file in path.glob("*/config.json"))
            hint = f" Its subfolders {', '.join(subfolders[:5])} contain one." if subfolders else ""
            raise ConfigError(
                f"{name}: there is no config.json in {path}.{hint} Pass the directory of a saved model, or config."
            )
        try:
            config, unused = AutoConfig.from_pretrained(
                path, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **overrides
            )
        except Exception as error:  # code of any configuration, which may raise anything for values it does not expect
            raise ConfigError(
                f"{name}: its config.json cannot be loaded: {' '.join(str(error).split())[:400]}"
            ) from error
    unused = [key for key in unused if key in overrides]
    if unused:
        fields = [*config.to_dict(), *inspect.signature(from_pretrained).parameters]
        raise ConfigError(
            [
                f"{name}: {key}={overrides[key]!r} is neither a field of its configuration ({type(config).__name__}) "
                f"nor an argument of from_pretrained.{did_you_mean(key, fields)}"
                for key in unused
            ]
        )
    config.name_or_path = name
    return config


def _load_from_files(request: LoadRequest) -> tuple[Any, WeightSource]:
    stored = stored_tensors(request.directory)  # before the model is built, which takes seconds for a large one
    model_class = request.model_class()
    keywords: dict[str, Any] = {}
    if request.trust_remote_code and hasattr(model_class, "from_config"):
        keywords["trust_remote_code"] = True
    directory = request.directory
    layers = getattr(request.config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > 100 * len(stored):  # which would take hours to build
        raise ConfigError(
            f"{directory / 'config.json'}: num_hidden_layers={layers:,}, but the files have {len(stored):,} tensors. "
            "Correct it."
        )
    try:
        model = build_on_meta(model_class, request.config, request.weight_dtype(stored), **keywords)
    except Exception as error:  # code of any model, for sizes that it does not expect
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{directory / 'config.json'}: a {model_class.__name__} cannot be made from it: "
            f"{' '.join(str(error).split())[:400] or type(error).__name__}. Correct its sizes."
        ) from error
    if (directory / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{directory / 'generation_config.json'} cannot be loaded: "
                f"{' '.join(str(error).split())[:400].rstrip('.')}. Correct or remove it."
            ) from error
    weights = open_weights(request.directory, model, request.key_mapping, stored=stored)
    parameters = {name for name, _ in model.named_parameters()}
    new = check_missing_weights(
        [name for name in weights.missing if name in parameters],  # buffers are computed by the model's code
        weights.mismatched,
        weights.unexpected,
        request.allow_new_weights,
        request.directory,
        type(model).__name__,
    )
    return model, ChainedSource([NewWeights(model, request.seed, new), weights]) if new else weights


def _check_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    if overrides.get("device_map") is not None:
        raise ConfigError(
            f"{name}: device_map={overrides['device_map']!r} is not supported. Set zero_stage=3 or "
            "tensor_parallel_size to distribute the model."
        )


def _check_patterns(name: str, key_mapping: Mapping[str, str] | None) -> None:
    for pattern in key_mapping or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{name}: {pattern!r} in key_mapping is not a valid regular expression ({error}). Correct it."
            ) from None


# Loads models that bitsandbytes quantizes to 4 or 8 bits, whole, on the device of each rank, with transformers.
#
# Quantized values are stored in blocks with one scale each, so a rank cannot read a part of a tensor. Below ZeRO stage
# 3 each rank holds the whole base anyway, at half a byte or one byte per weight.


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

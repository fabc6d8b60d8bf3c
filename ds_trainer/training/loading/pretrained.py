"""``from_pretrained``: a model by its directory or hub name, on meta, with the source of its weights attached."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.file_weights import open_weights
from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor, stored_tensors
from ds_trainer.engine.loading.fresh_weights import FreshWeights
from ds_trainer.engine.loading.weight_source import FirstThatHas, WeightSource, attach_weights, attached_weights
from ds_trainer.training.loading.adapters import SavedAdapters, with_adapters, with_saved_adapters
from ds_trainer.training.loading.model_class import class_of
from ds_trainer.training.loading.model_files import ADAPTER_CONFIG, model_directory
from ds_trainer.training.loading.new_weights import new_names
from ds_trainer.training.loading.on_meta import build_on_meta, dtype_of
from ds_trainer.training.loading.quantized import is_quantized, load_quantized, taken_quantization
from ds_trainer.utils.errors import ConfigError, did_you_mean


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
    """A model of transformers without its weights, and where they are: each rank reads what it holds, and when.

    The parameters are on the meta device; the engine of a :class:`ds_trainer.Trainer` turns them into the shards of a
    rank one at a time, each read from the files at that moment. The model takes no memory until then.

    A model that bitsandbytes quantizes to 4 or 8 bits (``quantization_config``, ``load_in_4bit``, or files that are
    quantized) is loaded at once and whole; with ``peft_config`` it can be trained below ZeRO stage 3.

    Args:
        name_or_path: a directory with ``config.json`` and weights (safetensors, or ``.bin``), or a name of the Hub,
            which is downloaded into its cache first. A directory of PEFT adapters (``adapter_config.json``) is a model
            too: base and adapters, to be trained on.
        auto_class: class of transformers to build, or its name (``"AutoModelForSequenceClassification"``); default:
            the one that the configuration names (``architectures``).
        dtype: type of the weights; default: that of the configuration, or of the file. The precision of a training is
            that of its arguments (``bf16``, ``fp16``).
        config: a configuration, or where it is; default: that of ``name_or_path``.
        peft_config: of PEFT; puts new adapters around the model.
        allow_new_weights: patterns of the names that the files may lack (``"classifier.*"``); True for any. They are
            initialized as the model initializes them.
        key_mapping: regular expressions of names in the file, and what replaces them, as transformers has it.
        seed: of everything that is initialized.
        revision, token, cache_dir, local_files_only, subfolder, trust_remote_code: as transformers has them.
        device: where quantized weights are loaded; default: the current GPU, or the CPU without any.
        config_overrides: fields of the configuration (``num_labels=3``, ``attn_implementation="sdpa"``).

    Raises:
        ConfigError: there is no such model, or its files do not fit it; the text names what to change.
    """
    name = os.fspath(name_or_path)
    dtype = config_overrides.pop("torch_dtype", None) if dtype is None else dtype
    _check_overrides(name, config_overrides)
    quantization = taken_quantization(name, config_overrides)
    _check_patterns(name, key_mapping)
    hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    directory = model_directory(name, revision=revision, subfolder=subfolder, **hub)  # type: ignore[arg-type]
    same = {"dtype": dtype, "key_mapping": key_mapping, "seed": seed, "trust_remote_code": trust_remote_code, **hub}
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file():
        if peft_config is not None:
            raise ConfigError(
                f"{name} holds adapters ({ADAPTER_CONFIG}), and peft_config asks for others. Leave out peft_config to "
                "train those on, or name the base model."
            )
        saved = SavedAdapters.of(directory)
        given = {"config": config, "allow_new_weights": saved.allowing(allow_new_weights), **config_overrides}
        given |= {"quantization_config": quantization, "device": device}
        inside = from_pretrained(saved.base, auto_class or saved.auto_class, **same, **given)  # type: ignore[arg-type]
        model, source = with_saved_adapters(inside, attached_weights(inside), directory)
    else:
        loaded = read_config(config, directory, name, trust_remote_code, config_overrides)
        known = (loaded, directory, name, auto_class, dtype, allow_new_weights, key_mapping, seed, trust_remote_code)
        source = None
        if is_quantized(name, loaded) or quantization is not None:
            model = _quantized(quantization, device, *known)
        else:
            model, source = _with_files(*known)
        if peft_config is not None:
            model, source = with_adapters(model, source, peft_config, seed)
    if source is not None:
        attach_weights(model, source)
    return model


def from_config(
    config: Any,
    auto_class: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    peft_config: Any = None,
    seed: int = 42,
) -> Any:
    """A new model of the architecture ``config``, on meta: its weights are initialized shard by shard.

    Args:
        config: of transformers.
        auto_class: class or its name; default: the one that ``config`` names.
        dtype: of the weights; default: that of ``config``, else float32.
        peft_config: of PEFT.
        seed: of the weights: with their names it decides every number.

    Raises:
        ConfigError: no class is known.
    """
    where = f"the {type(config).__name__} that was given as the model"
    model_class = class_of(config, auto_class, where)
    model = build_on_meta(model_class, config, dtype_of(dtype, config, lambda: None))
    source: WeightSource = FreshWeights(model, seed)
    if peft_config is not None:
        model, source = with_adapters(model, source, peft_config, seed)
    attach_weights(model, source)
    return model


def read_config(config: Any, directory: Path, name: str, trust_remote_code: bool, overrides: Mapping[str, Any]) -> Any:
    """The configuration of a model's ``directory``, with ``overrides``.

    Raises:
        ConfigError: it cannot be read, or does not have a field of ``overrides``.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        unused = [key for key in overrides if not hasattr(config, key)]
        for key in overrides.keys() - set(unused):
            setattr(config, key, overrides[key])
    else:
        place = directory if config is None else Path(config).expanduser()
        if not (place / "config.json").is_file() and not place.is_file():
            inside = sorted(path.parent.name for path in place.glob("*/config.json"))
            hint = f" It holds {', '.join(inside[:5])}, which have one." if inside else ""
            raise ConfigError(
                f"{name}: there is no config.json in {place}.{hint} Name the directory of a saved model, or config."
            )
        try:
            config, unused = AutoConfig.from_pretrained(
                place, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **overrides
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{name}: its config.json cannot be used: {' '.join(str(error).split())[:400]}"
            ) from error
    unused = [key for key in unused if key in overrides]
    if unused:
        fields = [*config.to_dict(), *inspect.signature(from_pretrained).parameters]
        raise ConfigError(
            [
                f"{name}: {key}={overrides[key]!r} is no field of its configuration ({type(config).__name__}), and no "
                "argument of from_pretrained."
                f"{did_you_mean(key, fields)}"
                for key in unused
            ]
        )
    config.name_or_path = name
    return config


def _with_files(
    config: Any,
    directory: Path,
    name: str,
    auto_class: Any,
    dtype: Any,
    allow_new_weights: Sequence[str] | bool,
    key_mapping: Mapping[str, str] | None,
    seed: int,
    trust_remote_code: bool,
) -> tuple[Any, WeightSource]:
    stored = stored_tensors(directory)  # before the model is built, which takes seconds for a large one
    model_class = class_of(config, auto_class, name, trust_remote_code)
    keywords = {"trust_remote_code": True} if trust_remote_code and hasattr(model_class, "from_config") else {}
    found = dtype_of(dtype, config, lambda: _first_type(stored))
    model = build_on_meta(model_class, config, found, **keywords)
    _read_generation_config(model, directory)
    weights = open_weights(directory, model, key_mapping, stored=stored)
    parameters = {key for key, _ in model.named_parameters()}
    new = new_names(
        [key for key in weights.missing if key in parameters],  # of buffers the code says the values
        weights.mismatched,
        weights.unexpected,
        allow_new_weights,
        directory,
        type(model).__name__,
    )
    return model, FirstThatHas([FreshWeights(model, seed, new), weights]) if new else weights


def _quantized(
    quantization: Any,
    device: torch.device | None,
    config: Any,
    directory: Path,
    name: str,
    auto_class: Any,
    dtype: Any,
    allow_new_weights: Sequence[str] | bool,
    key_mapping: Mapping[str, str] | None,
    seed: int,
    trust_remote_code: bool,
) -> Any:
    return load_quantized(
        class_of(config, auto_class, name, trust_remote_code),
        *(directory, name, config, quantization),
        dtype=dtype_of(dtype, config, lambda: _first_type(stored_tensors(directory))),
        device=device,
        allow_new_weights=allow_new_weights,
        key_mapping=key_mapping,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )


def _first_type(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """Of the first tensor that holds fractions; None without one."""
    types = (tensor.dtype for tensor in stored.values() if tensor.dtype is not None)
    return next((dtype for dtype in types if dtype.is_floating_point), None)


def _read_generation_config(model: Any, directory: Path) -> None:
    if (directory / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{directory / 'generation_config.json'} cannot be used: {' '.join(str(error).split())[:400]} Correct "
                "it, or remove it."
            ) from error


def _check_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    if overrides.get("device_map") is not None:
        raise ConfigError(
            f"{name}: device_map={overrides['device_map']!r} spreads a model by itself; here ZeRO stage 3 "
            "(zero_stage=3) or tensor_parallel_size does. Leave it out."
        )


def _check_patterns(name: str, key_mapping: Mapping[str, str] | None) -> None:
    for pattern in key_mapping or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{name}: key_mapping has {pattern!r}, which is no regular expression ({error}). Write the names of "
                "the file as Python's re reads them."
            ) from None

"""The model of a recipe: a causal language model from a directory or the Hub, or an architecture with random weights.

transformers is imported only where it is used, so the rest of a recipe can be checked without it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes.frozen_parts import freeze
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import exists

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Keys that every transformers config accepts in addition to its fields, or that older files use.
_COMMON_KEYS = {"model_type", "dtype", "torch_dtype"}
_OLD_ROPE_KEYS = {"rope_theta", "rope_scaling"}


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``; if that is not set, the tokenizer of the model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from ds_trainer.training.loading.model_files import model_directory

    named = recipe.data.tokenizer
    if named is None and recipe.model.path is None:
        return load_tokenizer("bytes")
    if named is not None and (named == "bytes" or exists(named)):
        return load_tokenizer(named)
    key, name = ("data.tokenizer", named) if named is not None else ("model.path", str(recipe.model.path))
    try:
        directory = model_directory(name, weights=False)
    except ConfigError as error:
        raise ConfigError(f"{recipe.where(key)}: {key}: {error}") from error
    return load_tokenizer(str(directory), key)


def language_model_config(recipe: Recipe, tokenizer: Tokenizer) -> PretrainedConfig:
    """The transformers config of the recipe's model, checked against the tokenizer and the sequence length.

    ``vocab_size``, ``bos_token_id`` and ``eos_token_id`` of an architecture default to those of the tokenizer.

    Raises:
        ConfigError: the config is invalid or does not fit the data; lists all problems.
    """
    _import_transformers()
    if recipe.model.path is not None:
        config = _config_of_directory(recipe, recipe.model.path)
    else:
        config = _config_of_architecture(recipe, dict(recipe.model.architecture or {}), tokenizer)
    problems = _fit_problems(recipe, config, tokenizer)
    if problems:
        raise ConfigError(problems)
    return config


def build_language_model(
    recipe: Recipe,
    config: PretrainedConfig,
    seed: int = 42,
    allow_new_weights: Sequence[str] | bool = (),
    auto_class: str = "AutoModelForCausalLM",
) -> PreTrainedModel:
    """The meta model and the source of its weights: the files of ``model.path``, or random numbers from ``seed``.

    Raises:
        ConfigError: the files do not fit the model, or PEFT rejects the adapter configuration.
    """
    from ds_trainer.training.loading.pretrained import from_config, from_pretrained

    spec = recipe.model
    # Adapters without a task are loaded with the class that the base names.
    task = {"task_type": "CAUSAL_LM"} if auto_class == "AutoModelForCausalLM" else {}
    common: dict[str, Any] = {
        "auto_class": spec.auto_class or auto_class,
        "dtype": spec.dtype or "float32",
        "peft_config": None if spec.peft is None else _adapters(recipe, {**task, **spec.peft}),
        "seed": seed,
    }
    model: PreTrainedModel
    if spec.path is None:
        model = from_config(config, **common)
    else:
        if spec.quantization is not None:
            common["quantization_config"] = spec.quantization
        model = from_pretrained(spec.path, config=config, allow_new_weights=allow_new_weights, **common)
    if spec.freeze:
        freeze(model, spec.freeze, recipe.where("model.freeze"))
    return model


def _adapters(recipe: Recipe, fields: dict[str, Any]) -> Any:
    from ds_trainer.training.loading.peft_adapters import make_peft_config

    return make_peft_config(fields, f"{recipe.where('model.peft')}: model.peft")


def load_language_model(directory: str, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """The model saved in ``directory``, in float32 on the CPU.

    Raises:
        ConfigError: it cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            os.path.expanduser(directory), config=config, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {directory!r} has no model that can be loaded: {_first_line(error)}") from error


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("Recipes need transformers: pip install 'ds-trainer[hf]'.") from error
    return transformers


def _config_of_directory(recipe: Recipe, path: str) -> PretrainedConfig:
    from transformers import AutoConfig

    from ds_trainer.training.loading.model_files import model_directory

    where = recipe.where("model.path")
    try:
        directory = model_directory(path, weights=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: model.path: {error}") from error
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{where}: model.path: {path!r} has no config.json; give the directory of a saved model.")
    if recipe.data.tokenizer == "bytes" and not (directory / ByteTokenizer.FILE_NAME).is_file():
        raise ConfigError(
            f"{where}: model.path: the model in {path!r} was not trained on bytes (no {ByteTokenizer.FILE_NAME}), but "
            "data.tokenizer is bytes. Remove data.tokenizer to use the tokenizer of the model, or set another."
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # code of any configuration, which may raise anything for values it does not expect
        raise ConfigError(f"{where}: model.path: {path!r}: {_first_line(error)}") from error
    return config


_SIZES = {
    *("hidden_size", "n_embd", "d_model", "dim", "n_head", "n_heads", "head_dim", "d_ff", "ffn_dim", "n_positions"),
    *("intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
}
_SIZE = re.compile(r"(_size|_dim|_heads?|_layers?|_embeddings|_positions)$|^(num|n|d)_|^dim$")


def _config_of_architecture(recipe: Recipe, architecture: dict[str, Any], tokenizer: Tokenizer) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = "model.architecture"
    model_type = architecture.pop("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise ConfigError(
            f"{recipe.where(f'{name}.model_type')}: {name}: transformers knows no causal language model of type "
            f"{model_type!r}.{hint}"
        )
    config_class = CONFIG_MAPPING[model_type]
    if dataclasses.is_dataclass(config_class):
        fields = {item.name for item in dataclasses.fields(config_class)}
    else:
        fields = set(inspect.signature(config_class).parameters) - {"kwargs"}
    renamed = set(getattr(config_class, "attribute_map", {}))
    valid = fields | renamed | _COMMON_KEYS | (_OLD_ROPE_KEYS if "rope_parameters" in fields else set())
    problems = [
        f"{recipe.where(f'{name}.{key}')}: unknown key '{name}.{key}' for a {model_type} model."
        f"{did_you_mean(key, valid) or f' {config_class.__name__} in transformers has the valid keys.'}"
        for key in architecture
        if key not in valid
    ]
    problems += [
        f"{recipe.where(f'{name}.{key}')}: {name}.{key}={value!r} must be 1 or more."
        for key, value in architecture.items()
        if isinstance(value, int | float) and value < (1 if key in _SIZES else 0) and _SIZE.search(key)
    ]
    if problems:
        raise ConfigError(problems)
    separator = tokenizer.separator_id
    defaults = {"vocab_size": tokenizer.vocab_size, "bos_token_id": separator, "eos_token_id": separator}
    known = {key: value for key, value in defaults.items() if key in valid}
    try:
        config: PretrainedConfig = config_class(**(known | architecture))
    except (StrictDataclassError, ValueError, TypeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{recipe.where(name)}: {name}: {reason}") from error
    return config


def _fit_problems(recipe: Recipe, config: PretrainedConfig, tokenizer: Tokenizer) -> list[str]:
    """Contradictions between the sizes of the model and of the data."""
    problems = []
    source = recipe.data.tokenizer or recipe.model.path or "bytes"
    text_config = config.get_text_config()
    vocabulary = getattr(text_config, "vocab_size", None)
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        problems.append(
            f"{recipe.where('model.architecture.vocab_size')}: the model's vocab_size={vocabulary} is smaller than the "
            f"{tokenizer.vocab_size} tokens of data.tokenizer={source!r}."
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and positions < recipe.tokens_per_sample:
        name = "data.max_length" if recipe.fine_tunes else "data.sequence_length"
        problems.append(
            f"{recipe.where(name)}: {name}={recipe.tokens_per_sample} is longer than the model's "
            f"max_position_embeddings={positions}."
        )
    return problems


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

"""A transformers model on the meta device, from its configuration: shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

# What a family is trained as, if its configuration names no class.
_TASKS = (
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
    "AutoModel",
)


_MOST_LAYERS = 10_000


def meta_model(config: Mapping[str, Any], name: str) -> nn.Module:
    """The model that ``config`` describes, on the meta device. It is of the class that ``architectures`` names.

    Args:
        config: a Hugging Face configuration as a mapping.
        name: for messages.

    Raises:
        ConfigError: transformers is not installed, or has no class for this family; the configuration is wrong.
    """
    family = config.get("model_type")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{name}: model_type={family!r} needs transformers to be planned, which cannot be imported: {error}"
        ) from error
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if not isinstance(family, str) or family not in CONFIG_MAPPING_NAMES:
        raise ConfigError(f"{name}: transformers {transformers.__version__} has no model_type={family!r}.")
    for key, value in config.items():
        if key.endswith(("layers", "layer")) and isinstance(value, int) and value > _MOST_LAYERS:
            raise ConfigError(f"{name}: {key}={value:,} is more than the {_MOST_LAYERS:,} layers that are planned.")
    # Weights are not quantized here; the loss is not computed.
    values = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        made = transformers.AutoConfig.for_model(**values)
        build = _builder(transformers, made, config.get("architectures") or ())
        if build is None:
            raise ConfigError(f"{name}: transformers {transformers.__version__} has no model of {family!r} to train.")
        with torch.device("meta"):
            model: nn.Module = build(made)
        empty = next((key for key, weight in model.named_parameters() if not weight.numel()), None)
        if empty is not None:
            raise ConfigError(f"{name}: {empty} has no element with this configuration; correct its sizes.")
    except ConfigError:
        raise
    except Exception as error:  # code of any model, which may raise anything for sizes that it does not expect
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{name}: a {family} model cannot be made from this configuration: {reason}") from error
    return model


def _builder(transformers: Any, config: Any, architectures: Any) -> Any:
    """The function that makes a model from a configuration; None if there is none."""
    for name in architectures:
        cls = getattr(transformers, name, None)
        if cls is not None and hasattr(cls, "_from_config"):
            return cls._from_config
    for name in _TASKS:
        task = getattr(transformers, name)
        if type(config) in task._model_mapping:
            return task.from_config
    return None

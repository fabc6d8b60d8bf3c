"""The hyperparameters that a tracker records: arguments, model configuration, DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_trainer.arguments.serialize import plain
from ds_trainer.utils.secrets import without_secrets


def hyperparameters(args: Any, model: Any, deepspeed_config: Callable[[], Mapping[str, Any]] | None) -> dict[str, Any]:
    """One mapping for a tracker's table of hyperparameters: plain data, without secrets.

    Training arguments override keys of the model's configuration with the same name, as in transformers.
    ``peft_config`` has the adapters' settings, ``ds_config`` the compiled DeepSpeed configuration.
    """
    values: dict[str, Any] = {}
    adapters = getattr(model, "peft_config", None)
    if adapters is not None:
        values["peft_config"] = without_secrets(plain(adapters))
    values.update(model_configuration(model))
    values.update(arguments(args))
    if deepspeed_config is not None:
        values["ds_config"] = without_secrets(deepspeed_config())
    return values


def arguments(args: Any) -> dict[str, Any]:
    """The training arguments as plain data, without secrets."""
    values: dict[str, Any] = without_secrets(args.to_dict())
    return values


def model_configuration(model: Any) -> dict[str, Any]:
    """``model.config`` as plain data; empty if the model has none."""
    config = getattr(model, "config", None)
    values = plain(config) if isinstance(config, Mapping) or hasattr(config, "to_dict") else None
    return dict(without_secrets(values)) if isinstance(values, Mapping) else {}


def parameter_count(model: Any) -> int | None:
    """Number of the model's parameters, including those of other ranks; None without a model."""
    if model is None:
        return None
    # With ZeRO-3 a parameter is empty between its uses; DeepSpeed keeps its full size in ds_numel.
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{path}."))
        else:
            flat[path] = value
    return flat

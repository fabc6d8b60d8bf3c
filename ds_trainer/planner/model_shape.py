"""``ModelShape``: the numbers of a model that determine its configuration and cost, without weights or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_trainer.planner.transformer_shape import Transformer, read_transformer

if TYPE_CHECKING:
    from torch import nn

# Configurations have different names for the width of the residual stream. Composite configurations nest it.
_WIDTH_NAMES = ("hidden_size", "d_model", "n_embd", "dim")
_LENGTH_NAMES = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class ModelShape:
    """What is known about a model before its weights exist.

    Args:
        hidden_size: width of the residual stream (the largest, if a model has several); None if unknown.
        source: where ``hidden_size`` was read, for messages and origins.
        transformer: dimensions of its layers, for the model families that
            :mod:`ds_trainer.planner.transformer_shape` supports; None for any other model.
        max_length: maximum sequence length in tokens; None if unknown.
        total: elements of all parameters; None if unknown.
        trainable: elements of those that are trained; None if unknown.
    """

    hidden_size: int | None = None
    source: str = "unknown"
    transformer: Transformer | None = None
    max_length: int | None = None
    total: int | None = None
    trainable: int | None = None

    @classmethod
    def from_config(cls, config: Any, source: str = "model config", class_name: str | None = None) -> ModelShape:
        """Read a Hugging Face configuration or a mapping of the same keys.

        A composite configuration (``text_config``, ``vision_config`` ...) returns the largest width of its parts and no
        layers.

        Args:
            config: the configuration.
            source: name of the configuration in messages.
            class_name: class of the model, which determines its head; default: the configuration's
                ``architectures``.
        """
        values = _as_mapping(config)
        widths = _widths(values, source)
        width, where = max(widths) if widths else (None, "unknown")
        lengths = [values[name] for name in _LENGTH_NAMES if isinstance(values.get(name), int) and values[name] > 0]
        return cls(width, where, read_transformer(values, class_name), max(lengths, default=None))

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelShape:
        """Read ``model.config``, and count parameters. A module without configuration has an unknown shape."""
        config = getattr(model, "config", None)
        found = cls() if config is None else cls.from_config(config, class_name=_class_name(model))
        counts = [(_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
        trained = sum(count for count, is_trained in counts if is_trained)
        return replace(found, total=sum(count for count, _ in counts), trainable=trained)


def _elements(parameter: nn.Parameter) -> int:
    """Those of the whole parameter, if ZeRO 3 has sharded it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _class_name(model: nn.Module) -> str:
    """Class of the model itself, without the wrapper of an adapter library."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return type(unwrap() if callable(unwrap) else model).__name__


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    return vars(config) if hasattr(config, "__dict__") else {}


def _widths(config: Mapping[str, Any], source: str) -> list[tuple[int, str]]:
    found = []
    for name in _WIDTH_NAMES:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found.append((value, f"{source}.{name}={value}"))
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            found += _widths(value, f"{source}.{name}")
    return found

"""``ModelShape``: the numbers of a model that determine its configuration and cost, without weights or torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ds_trainer.planner.transformer_shape import Transformer
from ds_trainer.utils.errors import ConfigError

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
        transformer: dimensions of its layers, for text models of transformers; None for any other model.
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
    def from_config(cls, config: Any, source: str = "model config", with_layers: bool = True) -> ModelShape:
        """Read a Hugging Face configuration or a mapping of the same keys.

        A composite configuration (``text_config``, ``vision_config`` ...) returns the largest width of its parts.

        Args:
            config: the configuration.
            source: name of the configuration in messages.
            with_layers: also find the dimensions of the layers of a model of transformers, which takes seconds the
                first time (:meth:`~ds_trainer.planner.planned_model.PlannedModel.from_config`).
        """
        values = _as_mapping(config)
        widths = _widths(values, source)
        width, where = max(widths) if widths else (None, "unknown")
        lengths = [values[name] for name in _LENGTH_NAMES if isinstance(values.get(name), int) and values[name] > 0]
        transformer = None
        if with_layers and values.get("model_type"):
            from ds_trainer.planner.planned_model import PlannedModel

            with suppress(ConfigError):  # not a model of transformers: its layers are not known
                transformer = of_text(PlannedModel.from_config(values, source).transformer)
        return cls(width, where, transformer, max(lengths, default=None))

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelShape:
        """Read ``model.config``, and count parameters. A module without configuration has an unknown shape.

        The layers of a model of transformers are read from its modules, once: tensor parallelism cuts them later.
        """
        config = getattr(model, "config", None)
        shape = cls() if config is None else cls.from_config(config, with_layers=False)
        counts = [(_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
        trained = sum(count for count, is_trained in counts if is_trained)
        total = sum(count for count, _ in counts)
        # The layers of a text model of transformers with so many parameters; None for another one.
        tensors = len(counts)
        known, version = _known.get(model), (tensors, getattr(getattr(model, "config", None), "vocab_size", None))
        if known is None or known[0] != version:
            from ds_trainer.planner.planned_model import PlannedModel

            unwrap: Any = getattr(model, "get_base_model", None)
            base = unwrap() if callable(unwrap) else model
            is_known = any(kind.__module__.startswith("transformers.models.") for kind in type(base).__mro__)
            known = (version, of_text(PlannedModel.from_module(model).transformer) if is_known and tensors else None)
            _known[model] = known
        return replace(shape, transformer=known[1], total=total, trainable=trained)


_known: WeakKeyDictionary[nn.Module, tuple[object, Transformer | None]] = WeakKeyDictionary()
"""Layers of models, with what tells whether they are still those."""


def _elements(parameter: nn.Parameter) -> int:
    """Those of the whole parameter, if ZeRO 3 has sharded it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def of_text(transformer: Transformer) -> Transformer | None:
    """``transformer`` if all of its stacks are of text and have attention; else None: layouts do not depend on it."""
    is_text = transformer.kind in ("decoder", "encoder", "encoder-decoder")
    known = is_text and all(stack.head_dim and stack.positions is None for stack in transformer.stacks)
    return transformer if known else None


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    return vars(config) if hasattr(config, "__dict__") else {}


def _widths(config: Mapping[str, Any], source: str) -> list[tuple[int, str]]:
    widths = []
    for name in _WIDTH_NAMES:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            widths.append((value, f"{source}.{name}={value}"))
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            widths += _widths(value, f"{source}.{name}")
    return widths

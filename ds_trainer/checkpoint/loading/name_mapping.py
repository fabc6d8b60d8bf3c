"""Maps each parameter to the tensors in the files that it consists of, by transformers' names and conversions.

The functions of transformers run on meta tensors, whose parts are traced to their locations in files. A conversion that
does more than move elements is recorded and runs on real tensors when the parameter is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor
from ds_trainer.checkpoint.weights.element_tracer import ElementTracer, TracedTensor, UntraceableOperation
from ds_trainer.checkpoint.weights.saved_names import is_pretrained_model
from ds_trainer.engine.weights import full_shape
from ds_trainer.utils.errors import ConfigError


class _MetaModel:
    """The parts of a model that conversions access: full shapes, as before sharding, and the configuration."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self._tensors = {
            name: torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    get_buffer = get_parameter_or_buffer = get_parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)


@dataclass
class WeightConversion:
    """A conversion that computes parameters from whole tensors in the files.

    Attributes:
        transform: the ``WeightConverter`` of transformers.
        name: the parameter that the transform is called for.
        sources: keys in the files by pattern, in the order that the transform expects.
        model: shapes and configuration of the model.
        shapes: shapes of the resulting parameters, by name.
    """

    transform: Any
    name: str
    sources: dict[str, list[str]]
    model: _MetaModel
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def compute(self, read: Callable[[str], Any]) -> dict[str, Any]:
        """Returns the parameters by name.

        Args:
            read: returns the whole tensor of a key.
        """
        transform = copy.deepcopy(self.transform)
        for pattern, keys in self.sources.items():
            transform.collected_tensors[pattern] = [read(key) for key in keys]
        converted = transform.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True)
class NameMapping:
    """How the files map to the tensors of the model.

    Attributes:
        tensors: for each name that the files provide, the stored elements that it consists of.
        unexpected: keys in the files that match no tensor of the model, with their names after renaming.
    """

    tensors: dict[str, TracedTensor | WeightConversion]
    unexpected: dict[str, str]


def map_names(
    model: nn.Module, stored: Mapping[str, StoredTensor], key_mapping: Mapping[str, str] | None, traced: bool = True
) -> NameMapping:
    """Find the stored tensors that each tensor of ``model`` consists of.

    Args:
        model: a model on any device; only names and shapes are used.
        stored: tensors in the files.
        key_mapping: patterns of keys in the files and their replacements, as in ``from_pretrained``; or None.
        traced: if False, compute every conversion from whole tensors.

    Raises:
        ConfigError: a conversion of transformers fails on these files.
    """
    tensors: dict[str, TracedTensor | WeightConversion]
    if not is_pretrained_model(model):
        if key_mapping:
            raise ConfigError(f"key_mapping requires a transformers model, not a {type(model).__name__}. Remove it.")
        names = model.state_dict().keys()
        tensors = {key: _of(stored, key) for key in stored if key in names}
        return NameMapping(tensors, {key: key for key in stored if key not in names})
    renamed, conversions, unexpected = _classify_keys(model, stored, key_mapping)
    tensors = {name: _of(stored, key) for name, key in renamed.items()}
    for conversion in conversions:
        tensors.update(_convert_group(conversion, stored, traced))
    return NameMapping(tensors, unexpected)


def _of(stored: Mapping[str, StoredTensor], key: str) -> TracedTensor:
    return TracedTensor.of(key, stored[key].shape, stored[key].strides)


def _classify_keys(
    model: Any, stored: Mapping[str, StoredTensor], key_mapping: Mapping[str, str] | None
) -> tuple[dict[str, str], list[WeightConversion], dict[str, str]]:
    """Returns the renamed keys by model name, the conversions, and the keys that match no tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    shapes = _MetaModel(model)
    names, prefix = shapes.state_dict(), model.base_model_prefix
    renamed: dict[str, str] = {}
    groups: dict[str, WeightConversion] = {}
    unexpected: dict[str, str] = {}
    for key in sorted(stored, key=dot_natural_key):  # the order of experts
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:  # a current name that a legacy rule would rename
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=names)
        if name not in names:
            unexpected[key] = name
        elif pattern is not None:
            group = groups.setdefault(name, WeightConversion(by_pattern[pattern], name, {}, shapes))
            group.sources.setdefault(pattern, []).append(key)
        else:
            renamed.setdefault(name, key)
    model._weight_conversions = [
        rule for rule in rules if rule.was_used()
    ]  # as from_pretrained does; save_pretrained reads it
    return renamed, list(groups.values()), unexpected


def _convert_group(
    group: WeightConversion, stored: Mapping[str, StoredTensor], traced: bool
) -> dict[str, TracedTensor | WeightConversion]:
    tracer = ElementTracer()

    def source(key: str) -> torch.Tensor:
        return tracer.source(key, stored[key].shape, stored[key].dtype, stored[key].strides)

    try:
        if traced:
            with suppress(UntraceableOperation):  # it computes
                with tracer:
                    moved = group.compute(source)
                return {name: tracer.boxes(value) for name, value in moved.items()}
        values = group.compute(source)
    except Exception as error:
        keys = [key for group_keys in group.sources.values() for key in group_keys]
        named = ", ".join(keys[:4]) + (" ..." if len(keys) > 4 else "")
        raise ConfigError(f"{group.name} cannot be converted from {named}. transformers reports: {error}") from error
    group.shapes = {name: tuple(value.shape) for name, value in values.items()}
    return dict.fromkeys(values, group)

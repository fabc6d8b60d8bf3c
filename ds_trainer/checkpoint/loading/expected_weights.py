"""The value that each element of a model should have according to the files that it was loaded from.

Names are converted by transformers' tables and tensors by transformers' operations. Only the requested elements are
traced back to the files (:meth:`~ds_trainer.checkpoint.weights.element_tracer.ElementTracer.trace`). To verify the
loading of weights, it maps names, follows elements and reads files by code of its own. Shared with loading is only the
record of the operations that transformers ran.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.loading.sampled_files import SampledFiles
from ds_trainer.checkpoint.weights.element_tracer import ElementTracer, Indices, UntraceableOperation


@dataclass
class _ExpectedGroup:
    """Model tensors that are converted together from tensors in the files."""

    name: str
    sources: list[tuple[str, str]]  # pattern, name in the files
    converter: Any = None
    tracer: ElementTracer | None = None  # None: the elements cannot be traced
    targets: dict[str, torch.Tensor] = field(default_factory=dict)  # meta


class ExpectedWeights:
    """The tensors of ``model`` as stored in the files.

    Args:
        model: a transformers model, or any module whose tensor names match the files.
        shapes: full shape of every parameter and persistent buffer, under each of its names.
        files: the files that the weights were loaded from.
        key_mapping: patterns of names in the files and their replacements, as in ``from_pretrained``.

    Attributes:
        shapes: shapes in the files, by the model's names.
        unexpected: names in the files that match no tensor of the model.
        failed: tensors that cannot be converted, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        files: SampledFiles,
        key_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._files = model, files
        self._full_shapes = _FullShapes(model, shapes)
        self._groups: dict[str, _ExpectedGroup] = {}
        self._computed: tuple[str, dict[str, torch.Tensor]] | None = None
        self.failed: dict[str, str] = {}
        groups, unexpected = _grouped(model, shapes, files.tensors, key_mapping)
        for group in groups:
            try:
                # Determine the converted tensors of a group and, where possible, trace their elements.
                tracer = ElementTracer()
                sources = {
                    name: tracer.source(name, self._files.tensors[name].shape, self._files.dtype(name))
                    for _, name in group.sources
                }
                try:
                    with tracer:
                        group.targets = self._run(group, sources)
                    group.tracer = tracer
                except UntraceableOperation:
                    group.targets = self._run(group, sources)
            except Exception as error:  # operations raise many types for tensors that do not fit together
                self.failed[group.name] = f"{type(error).__name__}: {error}"
            else:
                self._groups.update({name: group for name in group.targets})
        self.unexpected = _without_ignored_keys(model, unexpected)
        self.shapes = {name: tuple(group.targets[name].shape) for name, group in self._groups.items()}

    def sources(self, name: str) -> list[str]:
        """Returns the names of the stored tensors that ``name`` is built from."""
        return [source for _, source in self._groups[name].sources]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of the tensor before it is cast to the model's dtype."""
        return self._groups[name].targets[name].dtype

    def elements(self, name: str, indices: Indices) -> torch.Tensor:
        """Returns the elements ``indices`` of the flattened tensor ``name`` as float64."""
        group = self._groups[name]
        if group.tracer is None:
            # The converted tensors of a group that cannot be traced; one group at a time is in memory.
            if self._computed is None or self._computed[0] != group.name:
                self._computed = None
                sources = {name: self._files.whole(name) for _, name in group.sources}
                self._computed = (group.name, self._run(group, sources))
            return self._computed[1][name].reshape(-1)[torch.from_numpy(indices)].to(torch.float64)
        values = torch.empty(len(indices), dtype=torch.float64)
        for traced in group.tracer.trace(group.targets[name], indices):
            values[torch.from_numpy(traced.positions)] = self._files.elements(traced.name, traced.indices)
        return values

    def _run(self, group: _ExpectedGroup, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if group.converter is None:
            return {group.name: sources[group.sources[0][1]]}
        converter = copy.deepcopy(group.converter)
        for pattern, name in group.sources:
            converter.add_tensor(group.name, name, pattern, sources[name])
        with torch.no_grad():
            converted = converter.convert(
                group.name, model=self._full_shapes, config=getattr(self._model, "config", None)
            )
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


class _FullShapes:
    """The model as conversions see it: parameters have their full shapes even if this rank holds only a shard."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], device="meta")


def _grouped(
    model: nn.Module, known: Mapping[str, Any], stored: Iterable[str], key_mapping: Mapping[str, str] | None
) -> tuple[list[_ExpectedGroup], set[str]]:
    """Groups the names in the files by the tensors they become; also returns the names that the model does not have.

    Order and rules follow transformers (``core_model_loading.convert_and_load_state_dict_in_model``).
    """
    if not is_transformers_model(model):
        return [_ExpectedGroup(name, [("", name)]) for name in stored if name in known], set(stored) - set(known)
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = list(_conversions(model, key_mapping))
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names, prefix = dict.fromkeys(known, True), getattr(model, "base_model_prefix", "")
    groups: dict[str, _ExpectedGroup] = {}
    unexpected = set()
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if renamed not in names and name in names:
            renamed, pattern = rename_source_key(name, [], [], prefix, names)
        if renamed not in names:
            unexpected.add(name)
        elif pattern is None:
            groups.setdefault(renamed, _ExpectedGroup(renamed, [("", name)]))
        else:
            group = groups.setdefault(renamed, _ExpectedGroup(renamed, [], by_pattern[pattern]))
            group.sources.append((pattern, name))
    return list(groups.values()), unexpected


def _conversions(model: Any, key_mapping: Mapping[str, str] | None) -> Iterator[Any]:
    """The user's ``from_pretrained(key_mapping=...)``, followed by transformers' conversion table for the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    table = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    known = {(tuple(entry.source_patterns), tuple(entry.target_patterns)) for entry in table}
    for entry in getattr(model, "_weight_conversions", None) or ():
        added = (tuple(entry.source_patterns), tuple(entry.target_patterns)) not in known
        # Those of bitsandbytes leave the packed values as they are in the file.
        owners = {type(operation).__module__ for operation in getattr(entry, "operations", ())}
        if added and "transformers.integrations.bitsandbytes" not in owners:
            yield copy.deepcopy(entry)
    yield from table


def is_transformers_model(model: Any) -> bool:
    """Whether transformers converts names and tensors for this model."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers")
        for base in type(model).__mro__
    )


def _without_ignored_keys(model: Any, unexpected: set[str]) -> list[str]:
    """Removes the keys that the model's class declares as ignorable."""
    if is_transformers_model(model):
        loading_info = SimpleNamespace(missing_keys=set(), unexpected_keys=unexpected)
        model._adjust_missing_and_unexpected_keys(loading_info)
        unexpected = loading_info.unexpected_keys
    return sorted(unexpected)


def may_be_missing(model: Any, name: str) -> bool:
    """Whether the model's class declares ``name`` optional in the files."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)

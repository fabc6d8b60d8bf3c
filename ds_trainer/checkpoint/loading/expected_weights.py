"""What each element of a model should be, by the files that it was loaded from.

The names are converted by transformers' own tables, and the tensors by transformers' own operations, of which only
the elements that are asked for are followed back to the files (:mod:`~ds_trainer.checkpoint.loading.element_origins`).
Nothing here is shared with what loads weights.
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

from ds_trainer.checkpoint.loading.element_origins import ElementOrigins, Indices, UnknownOperation
from ds_trainer.checkpoint.loading.sampled_files import SampledFiles


@dataclass
class _Group:
    """Tensors of the model that are converted together from tensors of the files."""

    name: str
    sources: list[tuple[str, str]]  # pattern, name in the files
    converter: Any = None
    origins: ElementOrigins | None = None  # None where the elements cannot be followed
    targets: dict[str, torch.Tensor] = field(default_factory=dict)  # meta


class ExpectedWeights:
    """The tensors of ``model`` as the files have them.

    Args:
        model: a transformers model, or any module whose names are those of the files.
        shapes: of every parameter and persistent buffer, whole, by all of its names.
        files: what the weights were loaded from.
        key_mapping: patterns of names in the files and their replacements, as ``from_pretrained`` takes them.

    Attributes:
        shapes: of what the files have, by the names of the model.
        unexpected: names in the files that belong to no tensor of the model.
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
        self._helper = _WithShapes(model, shapes)
        self._groups: dict[str, _Group] = {}
        self._computed: tuple[str, dict[str, torch.Tensor]] | None = None
        self.failed: dict[str, str] = {}
        groups, unexpected = _grouped(model, shapes, files.tensors, key_mapping)
        for group in groups:
            try:
                self._convert(group)
            except Exception as error:  # whatever an operation raises about tensors that do not fit together
                self.failed[group.name] = f"{type(error).__name__}: {error}"
            else:
                self._groups.update({name: group for name in group.targets})
        self.unexpected = _as_transformers_sees(model, unexpected)
        self.shapes = {name: tuple(group.targets[name].shape) for name, group in self._groups.items()}

    def sources(self, name: str) -> list[str]:
        """The tensors in the files that ``name`` is made of."""
        return [source for _, source in self._groups[name].sources]

    def dtype(self, name: str) -> torch.dtype:
        """Type of the tensor before it is converted to the model's."""
        return self._groups[name].targets[name].dtype

    def at(self, name: str, indices: Indices) -> torch.Tensor:
        """Elements ``indices`` of the flattened tensor ``name``, in float64."""
        group = self._groups[name]
        if group.origins is None:
            return self._whole(group)[name].reshape(-1)[torch.from_numpy(indices)].to(torch.float64)
        found = torch.empty(len(indices), dtype=torch.float64)
        for origin in group.origins.of(group.targets[name], indices):
            found[torch.from_numpy(origin.asked)] = self._files.at(origin.name, origin.indices)
        return found

    def _convert(self, group: _Group) -> None:
        """Find out what the group becomes, and how its elements can be followed."""
        origins = ElementOrigins()
        sources = {
            name: origins.source(name, self._files.tensors[name].shape, self._files.dtype(name))
            for _, name in group.sources
        }
        try:
            with origins:
                group.targets = self._run(group, sources)
            group.origins = origins
        except UnknownOperation:
            group.targets = self._run(group, sources)

    def _whole(self, group: _Group) -> dict[str, torch.Tensor]:
        """Of an operation that computes: the real tensors, of one group at a time."""
        if self._computed is None or self._computed[0] != group.name:
            self._computed = None
            sources = {name: self._files.whole(name) for _, name in group.sources}
            self._computed = (group.name, self._run(group, sources))
        return self._computed[1]

    def _run(self, group: _Group, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if group.converter is None:
            return {group.name: sources[group.sources[0][1]]}
        converter = copy.deepcopy(group.converter)
        for pattern, name in group.sources:
            converter.add_tensor(group.name, name, pattern, sources[name])
        with torch.no_grad():
            made = converter.convert(group.name, model=self._helper, config=getattr(self._model, "config", None))
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class _WithShapes:
    """The model as conversions see it: parameters have their whole shapes, also where only a shard is here."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], device="meta")


def _grouped(
    model: nn.Module, known: Mapping[str, Any], stored: Iterable[str], key_mapping: Mapping[str, str] | None
) -> tuple[list[_Group], set[str]]:
    """The names in the files by what they become together, and those of which the model knows nothing.

    The order and the rules are those of transformers (``core_model_loading.convert_and_load_state_dict_in_model``).
    """
    if not is_transformers_model(model):
        return [_Group(name, [("", name)]) for name in stored if name in known], set(stored) - set(known)
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = list(_conversions(model, key_mapping))
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names, prefix = dict.fromkeys(known, True), getattr(model, "base_model_prefix", "")
    groups: dict[str, _Group] = {}
    unexpected = set()
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if renamed not in names and name in names:
            renamed, pattern = rename_source_key(name, [], [], prefix, names)
        if renamed not in names:
            unexpected.add(name)
        elif pattern is None:
            groups.setdefault(renamed, _Group(renamed, [("", name)]))
        else:
            group = groups.setdefault(renamed, _Group(renamed, [], by_pattern[pattern]))
            group.sources.append((pattern, name))
    return list(groups.values()), unexpected


def _conversions(model: Any, key_mapping: Mapping[str, str] | None) -> Iterator[Any]:
    """transformers' table for the model, after what a person gave to ``from_pretrained(key_mapping=...)``."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    table = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    known = {(tuple(entry.source_patterns), tuple(entry.target_patterns)) for entry in table}
    for entry in getattr(model, "_weight_conversions", None) or ():
        added = (tuple(entry.source_patterns), tuple(entry.target_patterns)) not in known
        if added and not any(_puts_scales_beside(operation) for operation in getattr(entry, "operations", ())):
            yield copy.deepcopy(entry)
    yield from table


def _puts_scales_beside(operation: Any) -> bool:
    """Of bitsandbytes: the packed numbers in the model are those of the file."""
    return type(operation).__module__ == "transformers.integrations.bitsandbytes"


def is_transformers_model(model: Any) -> bool:
    """Whether transformers converts names and tensors for it."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers")
        for base in type(model).__mro__
    )


def _as_transformers_sees(model: Any, unexpected: set[str]) -> list[str]:
    """Without what the model's class says to ignore."""
    if is_transformers_model(model):
        said = SimpleNamespace(missing_keys=set(), unexpected_keys=unexpected)
        model._adjust_missing_and_unexpected_keys(said)
        unexpected = said.unexpected_keys
    return sorted(unexpected)


def may_be_missing(model: Any, name: str) -> bool:
    """Whether the model's class says that files need not have ``name``."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)

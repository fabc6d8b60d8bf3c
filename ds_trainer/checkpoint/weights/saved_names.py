"""Names of a model's tensors in weight files, equal to those of transformers' ``save_pretrained``.

transformers converts weights while loading (for example, it stacks experts into one parameter) and reverses that when
saving. Nearly all of these conversions split tensors into runs of consecutive elements or concatenate whole tensors:
the file then stores the elements in the model's order, and only its header carries transformers' names. Tensors with
any other conversion (such as a transpose) are written as they are in the model.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ds_trainer.checkpoint.weights.weight_files import Section, WeightSpec

if TYPE_CHECKING:
    from ds_trainer.checkpoint.weights.element_tracer import TracedTensor

_cache: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, WeightSpec], list[Section]]] = WeakKeyDictionary()


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether it is a transformers model."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def sections_of(model: nn.Module, weights: Sequence[WeightSpec]) -> list[Section]:
    """Returns the contents of the weight files of ``model`` under the names that ``save_pretrained`` uses.

    Args:
        model: provides the conversions that were applied when it was loaded; its tensors are not accessed.
        weights: specifications of its full tensors, with the model's names.

    Returns:
        Sections in the order of ``weights``. Each contains all elements of its tensors.
    """
    if not is_pretrained_model(model):
        return [Section.of(weight) for weight in weights]
    by_name = {weight.name: weight for weight in weights}
    conversions = getattr(model, "_weight_conversions", None)
    cached = _cache.get(model)
    # It takes a second for 30,000 experts.
    if cached is None or cached[0] is not conversions or cached[1] != by_name:
        _cache[model] = cached = (conversions, by_name, _sections(model, by_name))
    return cached[2]


def _sections(model: Any, weights: Mapping[str, WeightSpec]) -> list[Section]:
    sections: list[Section] = []
    for group in _groups(model, weights):
        try:
            sections += group.sections(model)
        except Exception:  # it computes, accesses more than shapes, or has no runs: the names of the model are used
            sections += [Section.of(weight) for weight in group.tensors]
    count = Counter(entry.name for section in sections for entry in section.entries)
    unique = []
    for section in sections:
        if any(count[entry.name] > 1 for entry in section.entries):  # conversions that cannot be reversed
            unique += [Section.of(weight) for weight in section.tensors]
        else:
            unique.append(section)
    order = {name: index for index, name in enumerate(weights)}
    return sorted(unique, key=lambda section: order[section.tensors[0].name])


class _NoRunsError(Exception):
    """A tensor in the file does not consist of consecutive elements of the model's tensors."""


class _SavedGroup(NamedTuple):
    """Model tensors that transformers converts together when it saves.

    Attributes:
        name: transformers' name of the group.
        patterns: the pattern that each tensor matches.
        tensors: the tensors of the model.
        converter: None if the tensor is only renamed.
        renamings: renamings that are applied to the resulting names.
    """

    name: str
    patterns: list[str]
    tensors: list[WeightSpec]
    converter: Any
    renamings: Sequence[Any]

    def sections(self, model: Any) -> list[Section]:
        """Returns the sections of the file that contain the group.

        Raises:
            Exception: the conversion does more than move runs.
        """
        if self.converter is None:
            (weight,) = self.tensors
            return [Section((weight,), (weight._replace(name=self.name),))]
        from ds_trainer.checkpoint.weights.element_tracer import ElementTracer

        converter, tracer = copy.deepcopy(self.converter), ElementTracer()
        by_name = {weight.name: weight for weight in self.tensors}
        for pattern, weight in zip(self.patterns, self.tensors, strict=True):
            source = tracer.source(weight.name, weight.shape, weight.dtype)
            converter.add_tensor(self.name, weight.name, pattern, source)
        with tracer:
            converted = converter.convert(self.name, model=_Shapes(model.config, by_name), config=model.config)
        entries: dict[str, TracedTensor] = {}
        for name, value in converted.items():
            entries[_renamed(name, self.renamings)] = tracer.boxes(value[0] if isinstance(value, list) else value)
        if len({weight.dtype for weight in self.tensors}) > 1:
            raise _NoRunsError("several dtypes")
        return list(_aligned_sections(by_name, entries))


class _Shapes(NamedTuple):
    """The parts of a model that conversions access."""

    config: Any
    weights: Mapping[str, WeightSpec]

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.weights[name].shape, device="meta")


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _groups(model: Any, weights: Mapping[str, WeightSpec]) -> Iterator[_SavedGroup]:
    """Groups tensors as transformers reverses their conversion (``core_model_loading.revert_weight_conversion``)."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    reversed_rules = list(_reversed(model))
    renamings = [rule for rule in reversed_rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reversed_rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, _SavedGroup] = {}
    for name in sorted(weights, key=dot_natural_key):
        matches = (rule.rename_source_key(name) for rule in converters)
        target, pattern = next((match for match in matches if match[1] is not None), (name, None))
        if pattern is None:
            yield _SavedGroup(_renamed(name, renamings), [], [weights[name]], None, ())
            continue
        group = groups.setdefault(target, _SavedGroup(target, [], [], by_pattern[pattern], renamings))
        group.patterns.append(pattern)
        group.tensors.append(weights[name])
    yield from groups.values()


def _reversed(model: Any) -> Iterator[Any]:
    """Yields the reversed conversions of ``model`` in the order in which saving applies them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # not loaded: the prefixes in its files are unknown
        rules = [r for r in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(r, PrefixChange)]
    for rule in reversed(rules):
        try:
            yield rule.reverse_transform()
        except (NotImplementedError, ValueError):  # irreversible: the model's names are used
            continue


class _ElementRun(NamedTuple):
    """Elements that are consecutive both in a model tensor and in a file tensor."""

    tensor: str
    tensor_start: int
    entry: str
    entry_start: int
    length: int


def _aligned_sections(tensors: Mapping[str, WeightSpec], entries: Mapping[str, TracedTensor]) -> Iterator[Section]:
    """Order tensors and entries so that their concatenations are equal element by element.

    Raises:
        _NoRunsError: no such order exists.
    """
    runs = [run for name, entry in entries.items() for run in _runs(name, entry)]
    of_tensors = {(run.tensor, run.tensor_start): run for run in runs}
    of_entries = {(run.entry, run.entry_start): run for run in runs}
    sizes = {name: math.prod(entry.shape) for name, entry in entries.items()}
    if not len(runs) == len(of_tensors) == len(of_entries):
        raise _NoRunsError("elements that occur several times")
    visited = 0
    for first in runs:
        if first.tensor_start or first.entry_start:
            continue
        run, names, listed = first, [first.tensor], [first.entry]
        while True:
            visited += 1
            in_tensor, in_entry = run.tensor_start + run.length, run.entry_start + run.length
            tensor_ends, entry_ends = in_tensor == tensors[run.tensor].numel, in_entry == sizes[run.entry]
            if tensor_ends and entry_ends:
                break
            following = (
                of_entries.get((run.entry, in_entry)) if tensor_ends else of_tensors.get((run.tensor, in_tensor))
            )
            if tensor_ends and following is not None and following.tensor_start == 0:
                names.append(following.tensor)
            elif entry_ends and following is not None and following.entry_start == 0:
                listed.append(following.entry)
            else:
                raise _NoRunsError(run.tensor)
            run = following
        dtype = tensors[first.tensor].dtype
        yield Section(
            tuple(tensors[name] for name in names),
            tuple(WeightSpec(name, entries[name].shape, dtype) for name in listed),
        )
    if visited != len(runs):
        raise _NoRunsError("runs that do not start a tensor")


def _runs(name: str, entry: TracedTensor) -> Iterator[_ElementRun]:
    from ds_trainer.checkpoint.weights.strided_views import StridedView, coalesced, contiguous_strides

    strides = contiguous_strides(entry.shape)
    for source, (origin, view) in entry.parts:
        start = sum(first * stride for first, stride in zip(origin, strides, strict=True))
        in_entry, in_tensor = coalesced([StridedView(view.shape, strides, start), view])
        if in_entry.strides not in ((), (1,)) or in_tensor.strides not in ((), (1,)):
            raise _NoRunsError(name)
        yield _ElementRun(source, in_tensor.offset, name, in_entry.offset, in_tensor.numel)

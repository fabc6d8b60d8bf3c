"""What weight files call the tensors of a model: as ``save_pretrained`` of transformers does.

transformers converts weights while it loads them (experts are stacked into one parameter), and back when it saves them.
Nearly all of these conversions cut tensors into runs of their elements, or put whole tensors one after the other: a
file then has the elements in the order of the model, and only its header says what transformers calls them. What is
converted in another way (transposed, say) is written as the model has it.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ds_trainer.checkpoint.weights.geometry import View, coalesced, contiguous_strides
from ds_trainer.checkpoint.weights.sections import Section
from ds_trainer.checkpoint.weights.symbolic import NotSymbolicError, SymbolicTensor
from ds_trainer.checkpoint.weights.weight_files import Weight

_known: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Weight], list[Section]]] = WeakKeyDictionary()


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether it is a model of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def sections_of(model: nn.Module, weights: Sequence[Weight]) -> list[Section]:
    """What the weight files of ``model`` hold, under the names that ``save_pretrained`` would give.

    Args:
        model: only asked how it was converted when it was loaded; its tensors are not looked at.
        weights: its tensors, whole, by its own names.

    Returns:
        Sections in the order of ``weights``. Each has all elements of its tensors.
    """
    if not is_pretrained_model(model):
        return [Section.of(weight) for weight in weights]
    by_name = {weight.name: weight for weight in weights}
    conversions = getattr(model, "_weight_conversions", None)
    known = _known.get(model)
    if known is None or known[0] is not conversions or known[1] != by_name:  # it takes a second for 30,000 experts
        _known[model] = known = (conversions, by_name, _sections(model, by_name))
    return known[2]


def _sections(model: Any, weights: Mapping[str, Weight]) -> list[Section]:
    found: list[Section] = []
    for group in _groups(model, weights):
        try:
            found += group.sections(model)
        except (NotSymbolicError, _NoRunsError, AttributeError, KeyError):  # it computes, or asks for more than shapes
            found += [Section.of(weight) for weight in group.tensors]
    count = Counter(entry.name for section in found for entry in section.entries)
    unique = []
    for section in found:
        if any(count[entry.name] > 1 for entry in section.entries):  # conversions that cannot be reversed
            unique += [Section.of(weight) for weight in section.tensors]
        else:
            unique.append(section)
    order = {name: index for index, name in enumerate(weights)}
    return sorted(unique, key=lambda section: order[section.tensors[0].name])


class _NoRunsError(Exception):
    """A tensor of the file does not consist of whole runs of tensors of the model."""


class _Group(NamedTuple):
    """Tensors of the model that transformers converts together when it saves.

    Attributes:
        name: by which it calls them.
        tensors: of the model, with the pattern that each of them matches.
        converter: None if the tensor is only renamed.
        renamings: what is done to the names afterwards.
    """

    name: str
    patterns: list[str]
    tensors: list[Weight]
    converter: Any
    renamings: Sequence[Any]

    def sections(self, model: Any) -> list[Section]:
        """What the file holds of them.

        Raises:
            NotSymbolicError, _NoRunsError, AttributeError, KeyError: elements are not just moved in runs.
        """
        if self.converter is None:
            (weight,) = self.tensors
            return [Section((weight,), (weight._replace(name=self.name),))]
        converter = copy.deepcopy(self.converter)
        by_name = {weight.name: weight for weight in self.tensors}
        for pattern, weight in zip(self.patterns, self.tensors, strict=True):
            symbol = SymbolicTensor.of(weight.name, weight.shape, contiguous_strides(weight.shape))
            converter.add_tensor(self.name, weight.name, pattern, symbol)
        made = converter.convert(self.name, model=_Shapes(model.config, by_name), config=model.config)
        entries: dict[str, SymbolicTensor] = {}
        for name, value in made.items():
            entries[_renamed(name, self.renamings)] = value[0] if isinstance(value, list) else value
        if len({weight.dtype for weight in self.tensors}) > 1:
            raise _NoRunsError("several types")
        return list(_in_runs(by_name, entries))


class _Shapes(NamedTuple):
    """What an operation may ask a model for."""

    config: Any
    weights: Mapping[str, Weight]

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.weights[name].shape, device="meta")


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _groups(model: Any, weights: Mapping[str, Weight]) -> Iterator[_Group]:
    """Tensors by how transformers reverses their conversion (``core_model_loading.revert_weight_conversion``)."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    reversed_rules = list(_reversed(model))
    renamings = [rule for rule in reversed_rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reversed_rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(weights, key=dot_natural_key):
        matches = (rule.rename_source_key(name) for rule in converters)
        target, pattern = next((match for match in matches if match[1] is not None), (name, None))
        if pattern is None:
            yield _Group(_renamed(name, renamings), [], [weights[name]], None, ())
            continue
        group = groups.setdefault(target, _Group(target, [], [], by_pattern[pattern], renamings))
        group.patterns.append(pattern)
        group.tensors.append(weights[name])
    yield from groups.values()


def _reversed(model: Any) -> Iterator[Any]:
    """The conversions of ``model``, each reversed, in the order in which they are applied when it is saved."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # not loaded: the prefixes of its files are not known
        rules = [r for r in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(r, PrefixChange)]
    for rule in reversed(rules):
        try:
            yield rule.reverse_transform()
        except (NotImplementedError, ValueError):  # it has no reverse: the model's own names stay
            continue


class _Run(NamedTuple):
    """Consecutive elements of a tensor of the model that are consecutive in a tensor of the file."""

    tensor: str
    tensor_start: int
    entry: str
    entry_start: int
    length: int


def _in_runs(tensors: Mapping[str, Weight], entries: Mapping[str, SymbolicTensor]) -> Iterator[Section]:
    """Put tensors one after the other so that, element by element, it is the same as entries one after the other.

    Raises:
        _NoRunsError: there is no such order.
    """
    runs = [run for name, entry in entries.items() for run in _runs(name, entry)]
    of_tensors = {(run.tensor, run.tensor_start): run for run in runs}
    of_entries = {(run.entry, run.entry_start): run for run in runs}
    sizes = {name: entry.shape.numel() for name, entry in entries.items()}
    if not len(runs) == len(of_tensors) == len(of_entries):
        raise _NoRunsError("elements that are in several places")
    taken = 0
    for first in runs:
        if first.tensor_start or first.entry_start:
            continue
        run, names, listed = first, [first.tensor], [first.entry]
        while True:
            taken += 1
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
            tuple(Weight(name, tuple(entries[name].shape), dtype) for name in listed),
        )
    if taken != len(runs):
        raise _NoRunsError("runs that no tensor begins with")


def _runs(name: str, entry: SymbolicTensor) -> Iterator[_Run]:
    strides = contiguous_strides(entry.shape)
    for source, (origin, view) in entry.parts:
        start = sum(first * stride for first, stride in zip(origin, strides, strict=True))
        there, here = coalesced([View(view.shape, strides, start), view])
        if there.strides not in ((), (1,)) or here.strides not in ((), (1,)):
            raise _NoRunsError(name)
        yield _Run(source, here.offset, name, there.offset, here.numel)

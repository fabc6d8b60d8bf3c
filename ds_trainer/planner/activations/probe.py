"""Measures what one layer of a model keeps for the backward pass, in a run with sizes that are told apart.

The model is tiny, so a run takes milliseconds on the CPU. Its sizes (:data:`SIZES`) are chosen so that the number of
elements of a tensor, divided by the tokens of the batch, names the product of dimensions that it is.

Sources: ``torch.autograd.graph.saved_tensors_hooks`` for what is kept; a ``TorchDispatchMode`` that sees each new
storage for what is alive at a time. Weights, buffers and gradients of weights are not counted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.planner.activations.formula import Activations, Formula

BATCH, LENGTH = 7, 67
SIZES: dict[str, int] = {
    "hidden": 240,
    "inner": 520,
    "queries": 132,
    "keys": 44,
    "heads": 6,
    "key_heads": 2,
    "vocabulary": 1409,
    "length": LENGTH,
    "one": 1,
}
"""Dimensions of the tiny model; heads have a width of 22. Grouped matrix products need multiples of 8."""
EXPERTS: dict[str, int] = {"experts": 5, "active": 3}
"""More dimensions of a model with experts: how many there are, and how many process a token."""


class _LiveStorages(TorchDispatchMode):
    """The tensors that exist, except ``ignored`` ones, at each time that one more was made since :meth:`begin`."""

    def __init__(self, ignored: set[int], names: Mapping[int, dict[str, float]]) -> None:
        super().__init__()
        self._ignored, self._names = ignored, names
        self._alive: dict[int, Formula] = {}  # by address
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._moments: set[frozenset[tuple[str, float]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._add(value)
        return out

    def begin(self) -> None:
        """Compare with now from here on."""
        self._before, self._moments = dict(self._now), set()

    def end(self) -> tuple[Formula, ...]:
        """What existed in addition, for the moments of which none is always larger than another."""
        found = [Formula(dict(moment)) for moment in self._moments]
        return tuple(one for one in found if not any(other is not one and _covers(other, one) for other in found))

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or address in self._ignored:
            return
        size = storage.nbytes()
        self._alive[address] = formula = _one(size // tensor.element_size(), size, self._names)
        self._change(formula, 1)
        weakref.finalize(storage, self._remove, address)
        difference = ((name, value - self._before.get(name, 0.0)) for name, value in self._now.items())
        self._moments.add(frozenset((name, value) for name, value in difference if value))

    def _remove(self, address: int) -> None:
        self._change(self._alive.pop(address), -1)

    def _change(self, formula: Formula, sign: int) -> None:
        for name, value in formula.terms.items():
            self._now[name] = self._now.get(name, 0.0) + sign * value


def _covers(large: Formula, small: Formula) -> bool:
    names = {*large.terms, *small.terms}
    return all(large.terms.get(name, 0.0) >= small.terms.get(name, 0.0) for name in names) and large != small


def probe(model: nn.Module, layers: nn.ModuleList, sizes: Mapping[str, int]) -> Activations:
    """The formulas of ``model``, which has two layers and returns an output with a loss.

    Args:
        model: on the CPU; its dimensions are those of ``sizes``.
        layers: its layers.
        sizes: :data:`SIZES`, or with another ``queries``.

    Raises:
        ValueError: a tensor is none of the known products of dimensions.
    """
    assert len(layers) == 2
    ignored = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    names = _names(sizes)
    live = _LiveStorages(ignored, names)
    phases = _Phases(live)
    saved: dict[int, tuple[int | None, Formula]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored and storage._cdata not in saved:
            size = storage.nbytes()
            saved[storage._cdata] = (phases.layer, _one(size // tensor.element_size(), size, names))
        return tensor

    ids = torch.randint(0, sizes["vocabulary"], (BATCH, sizes["length"]))
    handles = phases.attach(layers)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), live:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    layer, outside = (sum((one for where, one in saved.values() if where == place), Formula()) for place in (1, None))
    return Activations(layer, outside, **phases.found)


class _Phases:
    """Watches the forward and backward pass of the last of two layers, and what is between them."""

    def __init__(self, live: _LiveStorages) -> None:
        self.layer: int | None = None
        self.found: dict[str, tuple[Formula, ...]] = {}
        self._live = live

    def attach(self, layers: nn.ModuleList) -> list[Any]:
        """Hooks on both layers."""
        handles: list[Any] = []
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index)))
            handles.append(layer.register_forward_hook(lambda *_, index=index: self._leave(index)))
        handles.append(layers[1].register_full_backward_pre_hook(lambda *_: self._between("loss")))
        handles.append(layers[1].register_full_backward_hook(lambda *_: self._between("backward")))
        return handles

    def _enter(self, index: int) -> None:
        self.layer = index
        self._live.begin()

    def _leave(self, index: int) -> None:
        self.layer = None
        if index == 1:
            self._between("forward")

    def _between(self, ended: str) -> None:
        self.found[ended] = self._live.end()
        self._live.begin()


def _names(sizes: Mapping[str, int]) -> dict[int, dict[str, float]]:
    """Elements per token, and the dimensions (with factors) that they stand for."""
    single: dict[str, dict[str, float]] = {name: {name: 1} for name in sizes}
    fused: dict[str, dict[str, float]] = {
        "qkv": {"queries": 1, "keys": 2},
        "3 hidden": {"hidden": 3},
        "2 inner": {"inner": 2},
        "queries and keys": {"queries": 1, "keys": 1},
    }
    found: dict[int, dict[str, float]] = {}
    for parts in (*single.values(), *fused.values()):
        found.setdefault(int(sum(sizes[name] * factor for name, factor in parts.items())), parts)
    found.setdefault(sizes["heads"] * sizes["length"], {"heads*length": 1})
    for name, eighths in itertools.product(("queries", "keys"), (1, 2, 3, 4, 6)):  # parts of heads that are rotated
        if sizes[name] * eighths % 8 == 0:
            found.setdefault(sizes[name] * eighths // 8, {name: eighths / 8})
    if "active" in sizes:
        for name in ("hidden", "inner", "one"):
            found[sizes["active"] * sizes[name]] = {f"active*{name}": 1}
        found[2 * sizes["active"] * sizes["inner"]] = {"active*inner": 2}
    return found


def _one(elements: int, size: int, names: Mapping[int, dict[str, float]]) -> Formula:
    per_token, rest = divmod(elements, BATCH * LENGTH)
    if rest or not elements:  # a weight's gradient, positions shared by the batch, a scalar: not in proportion
        return Formula()
    if per_token not in names:
        raise ValueError(f"a tensor of {elements} elements, {per_token} per token, is no known product of dimensions")
    return Formula({name: factor * size / elements for name, factor in names[per_token].items()})

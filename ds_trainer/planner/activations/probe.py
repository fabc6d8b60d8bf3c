"""Measures what one layer of a model keeps for the backward pass, in a run with sizes that are told apart.

The model is tiny, so a run takes milliseconds on the CPU. Its sizes (:data:`SIZES`) are chosen so that the number of
elements of a tensor, divided by the tokens of the batch, names the product of dimensions that it is.

Two dimensions of the same size (the heads together are as wide as the residual stream in many families) are told apart
by where a tensor is made: between the projections of an attention it belongs to heads. In a backward pass they are not.

The run is on the CPU, the formulas are those of a GPU: :func:`gpu_dropout`.

Sources: ``torch.autograd.graph.saved_tensors_hooks`` for what is kept; a ``TorchDispatchMode`` that sees each new
storage for what is alive at a time. Weights, buffers and gradients of weights are not counted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.planner.activations.formula import Activations, Formula

BATCH, LENGTH, SOURCE = 7, 67, 59
SIZES: dict[str, int] = {
    "hidden": 240,
    "inner": 520,
    "queries": 160,
    "keys": 32,
    "heads": 10,
    "key_heads": 2,
    "vocabulary": 1409,
    "length": LENGTH,
    "one": 1,
}
"""Dimensions of the tiny model; heads have a width of 16, of which a quarter may be rotated. Grouped matrix products
need multiples of 8."""
Names = Mapping[int, dict[str, float]]
EXPERTS: dict[str, int] = {"experts": 5, "active": 3}
"""More dimensions of a model with experts: how many there are, and how many process a token."""


@contextmanager
def gpu_dropout() -> Iterator[None]:
    """Dropout as GPUs do it: a mask of one byte an element, and none at all in fused attention.

    On the CPU torch keeps the noise in the dtype of the input, and fused attention with dropout falls back to separate
    operations, which keep the scores. Replaces two functions of ``torch.nn.functional`` while it is entered.
    """
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def fused(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    def without(*args: Any, **options: Any) -> torch.Tensor:
        return attention(*args, **{**options, "dropout_p": 0.0})

    F.dropout, F.scaled_dot_product_attention = fused, without
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention


class _LiveStorages(TorchDispatchMode):
    """The tensors that exist, except ``ignored`` ones, at each time that one more was made since :meth:`begin`."""

    def __init__(self, ignored: set[int], sizes: Mapping[str, int]) -> None:
        super().__init__()
        self._ignored, self._sizes = ignored, sizes
        self._names = {False: _names(sizes), True: _names(sizes, in_heads=True)}
        self.in_heads = False
        self.before_layers: set[int] = set()
        self._alive: dict[int, Formula] = {}  # by address
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._moments: set[frozenset[tuple[str, float]]] = set()

    def formula(self, storage: torch.UntypedStorage, width: int) -> Formula:
        """Bytes of a storage whose elements have ``width`` bytes."""
        known = self._alive.get(storage._cdata)
        if known is not None:
            return known
        size = storage.nbytes()
        elements = size // width
        names = self._names[self.in_heads]
        per_token, rest = divmod(elements, BATCH * self._sizes["length"])
        times = ""
        if rest:
            per_token, rest = divmod(elements, BATCH * SOURCE)
            times = "*source"
        if rest or not elements:  # a weight's gradient, positions shared by the batch, a scalar: not in proportion
            return Formula()
        if per_token not in names:
            raise ValueError(
                f"a tensor of {elements} elements, {per_token} per token, is no known product of dimensions"
            )
        return Formula({f"{name}{times}": factor * size / elements for name, factor in names[per_token].items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._add(value)
        return out

    def begin_layers(self) -> None:
        """The layers begin: what exists now belongs to none of them."""
        self.before_layers = set(self._alive)

    def begin(self) -> None:
        """Compare with now from here on."""
        self._before, self._moments = dict(self._now), set()

    def end(self) -> tuple[Formula, ...]:
        """What existed in addition, for the moments of which none is always larger than another."""
        formulas = [Formula(dict(moment)) for moment in self._moments]
        return tuple(one for one in formulas if not any(other is not one and _covers(other, one) for other in formulas))

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or address in self._ignored:
            return
        self._alive[address] = formula = self.formula(storage, tensor.element_size())
        self._change(formula, 1)
        weakref.finalize(storage, self._remove, address)
        difference = ((name, value - self._before.get(name, 0.0)) for name, value in self._now.items())
        self._moments.add(frozenset((name, value) for name, value in difference if value))

    def _remove(self, address: int) -> None:
        self.before_layers.discard(address)
        self._change(self._alive.pop(address), -1)

    def _change(self, formula: Formula, sign: int) -> None:
        for name, value in formula.terms.items():
            self._now[name] = self._now.get(name, 0.0) + sign * value


def _covers(large: Formula, small: Formula) -> bool:
    names = {*large.terms, *small.terms}
    return all(large.terms.get(name, 0.0) >= small.terms.get(name, 0.0) for name in names) and large != small


def probe(
    model: nn.Module, layers: nn.ModuleList, sizes: Mapping[str, int], inputs: Mapping[str, Any] | None = None
) -> Activations:
    """The formulas of ``model``, which has two layers and returns an output with a loss.

    Args:
        model: on the CPU; its dimensions are those of ``sizes``.
        layers: its layers, or those of one of its stacks.
        sizes: :data:`SIZES`, or with another ``queries``.
        inputs: arguments of the model; default: tokens, which are also the labels.

    Raises:
        ValueError: a tensor is none of the known products of dimensions.
    """
    assert len(layers) == 2
    if inputs is None:
        ids = torch.randint(0, sizes["vocabulary"], (BATCH, sizes["length"]))
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    given = [one for one in tree_leaves(dict(inputs)) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    ignored = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *given)}
    live = _LiveStorages(ignored, sizes)
    phases = _Phases(live)
    saved: dict[int, tuple[int | None, Formula]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored and storage._cdata not in saved:
            place = None if storage._cdata in live.before_layers and phases.layer else phases.layer
            saved[storage._cdata] = (place, live.formula(storage, tensor.element_size()))
        return tensor

    handles = phases.attach(layers)
    try:
        with gpu_dropout(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), live:
            model(**inputs).loss.backward()
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
        """Hooks on both layers, and on the projections of their attention."""
        handles: list[Any] = []
        for *inward, outward in (linears for layer in layers for linears in projections(layer)):
            handles += [one.register_forward_pre_hook(lambda *_: self._in_heads(True)) for one in inward]
            handles.append(outward.register_forward_pre_hook(lambda *_: self._in_heads(False)))
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index)))
            handles.append(layer.register_forward_hook(lambda *_, index=index: self._leave(index)))
        handles.append(layers[1].register_full_backward_pre_hook(lambda *_: self._between("loss")))
        handles.append(layers[1].register_full_backward_hook(lambda *_: self._between("backward")))
        return handles

    def _enter(self, index: int) -> None:
        self.layer = index
        if index == 0:
            self._live.begin_layers()
        self._live.begin()

    def _leave(self, index: int) -> None:
        self.layer = None
        if index == 1:
            self._between("forward")

    def _in_heads(self, value: bool) -> None:
        self._live.in_heads = value

    def _between(self, ended: str) -> None:
        self.found[ended] = self._live.end()
        self._live.begin()


def projections(layer: nn.Module) -> Iterator[list[nn.Module]]:
    """The linear layers of each attention in a layer; the last one is the output projection."""
    outer: list[str] = []
    for name, module in layer.named_modules():
        kind = type(module).__name__.lower()
        if ("attention" in kind or "attn" in kind) and not name.startswith(tuple(f"{one}." for one in outer)):
            outer.append(name)
            linears = [
                part
                for part in module.modules()
                if not isinstance(part, nn.Embedding) and getattr(getattr(part, "weight", None), "ndim", 0) == 2
            ]
            if len(linears) > 1:
                yield linears


def _names(sizes: Mapping[str, int], in_heads: bool = False) -> dict[int, dict[str, float]]:
    """Elements per token, and the dimensions (with factors) that they stand for.

    Args:
        sizes: the dimensions.
        in_heads: for tensors inside of an attention: heads come before dimensions of the same size.
    """
    single: dict[str, dict[str, float]] = {name: {name: 1} for name in sizes}
    fused: dict[str, dict[str, float]] = {
        "qkv": {"queries": 1, "keys": 2},
        "3 hidden": {"hidden": 3},
        "2 inner": {"inner": 2},
        "queries and keys": {"queries": 1, "keys": 1},
    }
    heads = ({"queries": 1.0}, {"keys": 1.0}, fused["qkv"]) if in_heads else ()
    outside = () if in_heads else (fused["3 hidden"],)
    names: dict[int, dict[str, float]] = {}
    for parts in (*heads, *outside, *single.values(), *fused.values()):
        names.setdefault(int(sum(sizes[name] * factor for name, factor in parts.items())), parts)
    names.setdefault(sizes["heads"] * sizes["length"], {"heads*length": 1})
    names.setdefault(sizes["heads"] * SOURCE, {"heads*length*source": 1})
    for name, eighths in itertools.product(("queries", "keys"), (1, 2, 3, 4, 6)):  # parts of heads that are rotated
        if sizes[name] * eighths % 8 == 0:
            names.setdefault(sizes[name] * eighths // 8, {name: eighths / 8})
    if "active" in sizes:
        for name in ("hidden", "inner", "one"):
            names[sizes["active"] * sizes[name]] = {f"active*{name}": 1}
        names[2 * sizes["active"] * sizes["inner"]] = {"active*inner": 2}
    return names

"""Reading an engine's state as pieces of whole tensors, and putting it back, in whatever layout.

Every element of every master weight and optimizer state is given by one rank and no other: under ZeRO by the one that
holds it, of what all data-parallel ranks hold by each of them a share. The weights themselves are not among it where
the optimizer has masters of them: they follow by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ds_trainer.engine.state.devices import on_device, scalar_as_kept
from ds_trainer.engine.state.units import Unit, place_of, shard_place, units_of, weights_follow
from ds_trainer.parallel.places import Place

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

MASTER, WEIGHT, BUFFER = "master", "weight", "buffer"
"""Kinds besides the keys of an optimizer's state: what is stepped, what is not, and what is no parameter."""

MOST_WRITERS = 16
"""Ranks that write shares of what all ranks hold, at most: as many files does each of them open to read it back."""


class Piece(NamedTuple):
    """``len(place)`` elements of a tensor: flat, on any device, not to be changed.

    A piece without elements says that the tensor has this kind of state: who holds padding only needs to know.
    """

    name: str
    kind: str
    place: Place
    tensor: torch.Tensor


class Pieces(NamedTuple):
    """What fits into memory together.

    Attributes:
        tensors: pieces of tensors.
        scalars: of each parameter's optimizer state what is one number: ``{parameter: {key: value}}``.
        extras: states of another shape than their parameter, by the first member of their unit: these can be put
            back into the same layout only.
    """

    tensors: list[Piece]
    scalars: dict[str, dict[str, Any]]
    extras: dict[str, dict[str, Any]]


class Source(Protocol):
    """Where pieces are read from."""

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """What there is of a parameter or buffer, with the type of its elements."""

    def fill(self, name: str, kind: str, place: Place, target: torch.Tensor) -> None:
        """Read into ``target``, a flat tensor of ``len(place)`` elements."""

    def scalars(self, name: str) -> dict[str, Any]:
        """One-number states of a parameter."""

    def extras(self, name: str) -> dict[str, Any]:
        """States of another shape, which this rank wrote in the same layout."""


def read_pieces(engine: TrainingEngine, apart: Collection[str] = ()) -> Iterator[Pieces]:
    """This rank's part of the state; tensors are the engine's own and valid until the next one is asked for.

    States that DeepSpeed has swapped out come one sub-group at a time.

    Args:
        engine: whose state is read.
        apart: names of parameters that no optimizer steps, and that are not asked for.

    Raises:
        UnknownState: DeepSpeed's optimizer is none whose state is known.
    """
    units = units_of(engine.deepspeed, engine.groups.place.tp)
    resident = [unit for unit in units if unit.tensor.numel() == unit.numel]
    first = Pieces(list(_not_stepped(engine, units, apart)), {}, {})
    numbers = numbers_among((unit.tensor, unit.states) for unit in units)
    for unit in resident:
        _read_unit(engine, unit, numbers, first)
    yield first
    for unit in units:
        if unit.tensor.numel() != unit.numel:
            with unit.present(False):
                found = Pieces([], {}, {})
                _read_unit(engine, unit, numbers, found)
                yield found


def _read_unit(engine: TrainingEngine, unit: Unit, numbers: set[str], into: Pieces) -> None:
    tensors = {MASTER: unit.tensor, **elementwise(unit.tensor, unit.states, numbers)}
    for member in unit.members:
        if not _is_mine(engine, member.place):
            continue
        place = _own_part(engine, member.place) if unit.replicated else member.place
        start = member.offset + place.start - member.place.start
        for kind, tensor in tensors.items():
            flat = tensor.detach().reshape(-1)[start : start + len(place)]
            into.tensors.append(Piece(member.name, kind, place, flat))
    rest = {key: value for key, value in unit.states.items() if key not in tensors}
    scalars = {key: value for key, value in rest.items() if _is_scalar(value)}
    for member in unit.members:
        if scalars:
            into.scalars[member.name] = scalars
    extras = {key: value for key, value in rest.items() if key not in scalars}
    if extras and unit.members:
        into.extras[unit.members[0].name] = extras


def frozen_names(engine: TrainingEngine) -> frozenset[str]:
    """Parameters that are not trained: no optimizer steps them, on no rank. Alike on all ranks.

    Raises:
        UnknownState: DeepSpeed's optimizer is none whose state is known.
    """
    stepped = _stepped(engine, units_of(engine.deepspeed, engine.groups.place.tp))
    named = engine.deepspeed.module.named_parameters()
    return frozenset(name for name, one in named if id(one) not in stepped and not one.requires_grad)


def frozen_pieces(engine: TrainingEngine, names: Collection[str]) -> list[Piece]:
    """This rank's part of those of :func:`frozen_names`; tensors are the engine's own."""
    parameters = engine.deepspeed.module.named_parameters()
    return list(_weights(engine, ((name, parameter) for name, parameter in parameters if name in names)))


def _not_stepped(engine: TrainingEngine, units: list[Unit], apart: Collection[str]) -> Iterator[Piece]:
    """Parameters that no optimizer steps, but for those ``apart``, and buffers, of which every rank has its own."""
    model, stepped = engine.deepspeed.module, _stepped(engine, units)
    named = model.named_parameters()
    yield from _weights(engine, ((name, p) for name, p in named if id(p) not in stepped and name not in apart))
    for name, buffer in persistent_buffers(model):
        yield Piece(name, BUFFER, Place.whole(buffer.shape), buffer.detach().reshape(-1))


def _weights(engine: TrainingEngine, named: Iterable[tuple[str, Any]]) -> Iterator[Piece]:
    for name, parameter in named:
        place = place_of(parameter, engine.groups.place.tp)
        if not _is_mine(engine, place):
            continue
        if hasattr(parameter, "ds_tensor"):
            shard = shard_place(parameter, engine.groups.place.tp)
            yield Piece(name, WEIGHT, shard, parameter.ds_tensor.detach().view(-1)[: len(shard)])
        else:
            part = _own_part(engine, place)
            yield Piece(name, WEIGHT, part, parameter.detach().reshape(-1)[part.start : part.stop])


def _stepped(engine: TrainingEngine, units: list[Unit]) -> set[int]:
    return {id(member.parameter) for unit in units for member in unit.members} | _stepped_elsewhere(engine)


def _stepped_elsewhere(engine: TrainingEngine) -> set[int]:
    """Parameters whose masters are all on other ranks: ZeRO 1 and 2 may give a rank nothing of them."""
    wrapper: Any = engine.deepspeed.optimizer
    groups = getattr(wrapper, "bit16_groups", None) or getattr(wrapper, "bf16_groups", None) or []
    return {id(parameter) for group in groups for parameter in group}


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to the model's state, each once."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def changes_in_steps_only(engine: TrainingEngine) -> Callable[[Piece], bool]:
    """Tells which pieces nothing but an optimizer step changes: their memory is none of the model's own."""
    model = engine.deepspeed.module
    own: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        own.update(t.untyped_storage().data_ptr() for t in (tensor, getattr(tensor, "ds_tensor", tensor)))
    return lambda piece: piece.kind != BUFFER and piece.tensor.untyped_storage().data_ptr() not in own


def all_in_memory(engine: TrainingEngine) -> bool:
    """Whether DeepSpeed has swapped nothing of the state out."""
    return all(unit.tensor.numel() == unit.numel for unit in units_of(engine.deepspeed, engine.groups.place.tp))


def _is_mine(engine: TrainingEngine, place: Place) -> bool:
    """Of what all tensor-parallel ranks hold whole, the first one speaks."""
    return place.dim is not None or engine.groups.place.tp == 0


def _own_part(engine: TrainingEngine, place: Place) -> Place:
    """This rank's share of what all data-parallel ranks hold; without elements where it is none of the writers."""
    group = engine.groups.gradient
    writers = writers_of_replicas(group.size())
    if group.rank() not in writers:
        return place.run(place.start, place.start)
    return place.share(writers.index(group.rank()), len(writers))


def writers_of_replicas(ranks: int) -> list[int]:
    """Of ``ranks`` that all hold the same, those that write a share of it, spread over the machines.

    Reading it back takes all shares, so their number must not grow with the ranks.
    """
    writers = min(ranks, MOST_WRITERS)
    return [index * ranks // writers for index in range(writers)]


_NUMBERS_OF_TORCH = frozenset({"step", "eta", "mu", "mu_product"})  # of all optimizers; of ASGD; of NAdam


def numbers_among(stepped: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> set[str]:
    """Which states of an optimizer are one number for a whole parameter.

    Of a parameter without dimensions, an average looks like such a number; of the others it does not. Where all
    parameters are without dimensions, those of torch's optimizers are known by name.

    Args:
        stepped: each tensor that the optimizer steps, with its states.
    """
    seen: dict[str, bool] = {}
    for tensor, states in stepped:
        if tensor.dim():
            seen.update({key: value.dim() == 0 for key, value in states.items() if isinstance(value, torch.Tensor)})
    return {key for key, is_number in seen.items() if is_number} | (_NUMBERS_OF_TORCH - seen.keys())


def elementwise(tensor: torch.Tensor, states: Mapping[str, Any], numbers: set[str]) -> dict[str, torch.Tensor]:
    """Those of ``states`` that have one number for each element of ``tensor``; ``numbers`` have one for all."""
    alike = {k: v for k, v in states.items() if type(v) is torch.Tensor and v.shape == tensor.shape and k != "step"}
    return {key: value for key, value in alike.items() if value.dim() or key not in numbers}


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, str))


def write_pieces(engine: TrainingEngine, source: Source, left_out: Collection[str] = ()) -> None:
    """Put the state that ``source`` has into the engine. Collective.

    States that the source lacks for some parameters of a unit (which had no gradient yet) become zero there; a unit
    of which it has none gets none.

    Args:
        engine: whose state is replaced.
        source: where it is read from.
        left_out: names of parameters that no optimizer steps, and that stay as they are.

    Raises:
        ConfigError: the source lacks something that this layout needs.
    """
    wrapper: Any = engine.deepspeed.optimizer
    sharded = hasattr(wrapper, "checkpoint_event_prologue")  # parameters that stay gathered are let go meanwhile
    if sharded:
        wrapper.checkpoint_event_prologue()
    units = units_of(engine.deepspeed, engine.groups.place.tp)
    with torch.no_grad():
        for unit in units:
            with unit.present(True):
                _write_unit(unit, source)
        _write_not_stepped(engine, units, source, left_out)
    weights_follow(engine.deepspeed)
    if sharded:
        wrapper.checkpoint_event_epilogue()


def _write_unit(unit: Unit, source: Source) -> None:
    for member in unit.members:
        kind = MASTER if MASTER in source.kinds(member.name) else WEIGHT  # it was frozen when it was saved
        _fill(unit.tensor, member.offset, source, member.name, kind, member.place)
    kinds: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for member in unit.members:
        kinds.update({k: d for k, d in source.kinds(member.name).items() if k not in (MASTER, WEIGHT, BUFFER)})
        scalars.update(source.scalars(member.name))
    states = unit.states
    for kind, dtype in kinds.items():
        present = states.get(kind)
        if isinstance(present, torch.Tensor) and present.shape == unit.tensor.shape:
            present.zero_()
        else:
            states[kind] = present = torch.zeros_like(unit.tensor, dtype=dtype, requires_grad=False)
        for member in unit.members:
            if kind in source.kinds(member.name):
                _fill(present, member.offset, source, member.name, kind, member.place)
    for key, value in scalars.items():
        states[key] = scalar_as_kept(unit, key, value)
    if unit.members:
        states.update(on_device(source.extras(unit.members[0].name), unit.tensor.device))


def _fill(tensor: torch.Tensor, offset: int, source: Source, name: str, kind: str, place: Place) -> None:
    """Fill elements of ``tensor`` from ``offset`` on, counted in the order of its indices."""
    flat = tensor.detach().reshape(-1)  # a copy where the tensor is not contiguous
    source.fill(name, kind, place, flat[offset : offset + len(place)])
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def _write_not_stepped(engine: TrainingEngine, units: list[Unit], source: Source, left_out: Collection[str]) -> None:
    model, stepped = engine.deepspeed.module, _stepped(engine, units)
    for name, parameter in model.named_parameters():
        if id(parameter) in stepped or name in left_out:
            continue
        kind = WEIGHT if WEIGHT in source.kinds(name) else MASTER
        if hasattr(parameter, "ds_tensor"):
            shard = shard_place(parameter, engine.groups.place.tp)
            _fill(parameter.ds_tensor, 0, source, name, kind, shard)
        else:
            _fill(parameter, 0, source, name, kind, place_of(parameter, engine.groups.place.tp))
    for name, buffer in persistent_buffers(model):
        if name in left_out and BUFFER not in source.kinds(name):
            continue  # adapters were saved without the model that they belong to
        _fill(buffer, 0, source, name, BUFFER, Place.whole(buffer.shape))

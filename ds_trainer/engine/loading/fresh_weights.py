"""Weights of a new model: any piece of any tensor, with the distribution that the model's own initialization gives.

The numbers follow from the seed and the tensor's name alone, so that they are the same in every layout: a tensor is
drawn in blocks of its flattened elements, each with a generator of its own, and who wants a piece draws the blocks that
it touches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from ds_trainer.engine.loading.construction_record import constructed
from ds_trainer.engine.loading.initialization import (
    all_tensors,
    global_generator_unchanged,
    initializes_in_constructor,
    initializes_modules,
    marked_uninitialized,
    untied,
)
from ds_trainer.engine.loading.initialization_record import (
    KeepsNumbers,
    groups_of_computed,
    record_initialization,
    storage_of,
)
from ds_trainer.engine.loading.initialization_steps import Step, TensorRecord
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils.errors import ConfigError, did_you_mean

BLOCK = 2**16
"""Elements that are drawn at a time."""


class FreshWeights:
    """Random numbers as ``model`` initializes itself; a WeightSource (weight_source.py).

    That is ``_init_weights`` of a model of transformers, after ``reset_parameters()`` of every module that has it. It
    runs once on the meta device, where it costs nothing, and what it does is repeated on each block that is asked for,
    in the tensor's own type. What cannot be done to a block by itself (an orthogonal matrix, a table that is computed)
    is initialized whole on the host, one tensor at a time.

    A piece costs the blocks that it touches: a run of ZeRO-3 at most two blocks more than the run. Columns of a matrix
    touch every row; ``n`` ranks that cut it so draw all of it each.

    Attributes:
        drawn: elements that were drawn so far.
    """

    def __init__(self, model: nn.Module, seed: int, names: Collection[str] | None = None) -> None:
        """
        Args:
            model: its tensors to initialize are on the meta device. It is not changed.
            seed: another seed gives other numbers.
            names: of ``named_parameters()`` and ``named_buffers()``; None for all that are on meta.

        Raises:
            ConfigError: the initialization of the model leaves some of them as they are; all of them, by name.
        """
        self.drawn = 0
        self._model = model
        self._seed = seed
        self._tensors = _tensors_on_meta(model, names)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self._slots = _slots_of(model, self._tensors)
        self._record = record_initialization(model, self._tensors)
        watched = {
            name: record for name, tensor in self._tensors.items() if (record := constructed(tensor)) is not None
        }
        if len(watched) < len(self._tensors):
            _refuse_own_constructor(model)
        self._record.tensors |= watched
        self._groups = groups_of_computed(self._record)
        self._computed: dict[str, torch.Tensor] = {}
        _refuse([name for name, tensor in self._record.tensors.items() if not tensor.initialized], "")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        if name not in self._tensors:
            raise ConfigError(f"{name} is not among the weights that are initialized.")
        if place.shape != self._shapes[name]:
            raise ConfigError(f"{name} has shape {self._shapes[name]} in the model, but {place.shape} is asked for.")
        if name in self._groups:
            copy_common(target, place, self._compute(name), Place.whole(place.shape))
            return
        record = self._record.tensors[name]
        everything = Place.whole(place.shape)
        for index in _blocks_of(place):
            start, stop = index * BLOCK, min((index + 1) * BLOCK, record.numel)
            copy_common(target, place, self._draw(name, record, start, stop), everything.run(start, stop))

    def _draw(self, name: str, record: TensorRecord, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)``, a block, of the flattened tensor."""
        values = torch.empty(stop - start, dtype=record.dtype)
        for index, step in enumerate(record.steps):
            assert isinstance(step, Step)
            mask = None
            if step.view.size is not None and (mask := step.view.mask(start, stop)) is None:
                continue
            changed = values if mask is None else values.clone()
            if step.kind == "value":
                changed = step.arguments[0][start:stop].clone()
            elif step.kind == "random":
                generator = torch.Generator().manual_seed(_block_seed(self._key(name, index), start // BLOCK))
                self.drawn += stop - start
                step.operation(changed, *step.arguments, **step.options, generator=generator)
            else:
                step.operation(changed, *step.arguments, **step.options)
            values = changed if mask is None else torch.where(mask, changed, values)
        return values

    def _key(self, name: str, step: int | str) -> int:
        text = f"{self._seed}\0{name}\0{step}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def _compute(self, name: str) -> torch.Tensor:
        """The flat tensor, whole, initialized by the model itself; kept until another is wanted."""
        if name not in self._computed:
            self._computed = {}
            group = sorted(self._groups[name])
            self._computed = self._initialize(group)
            holes = [name for name, values in self._computed.items() if values.isnan().any()]
            _refuse(holes, " whole")
        return self._computed[name]

    def _initialize(self, group: list[str]) -> dict[str, torch.Tensor]:
        """Make the calls that initialize ``group`` with real tensors in the place of those alone."""
        slots = [(getattr(module, kind), key, name) for name in group for module, kind, key in self._slots[name]]
        before = [tensors.get(key) for tensors, key, _ in slots]
        kept = [tensor for tensor in all_tensors(self._model) if not tensor.is_meta]
        real = {
            name: _real(self._tensors[name], self._shapes[name], self._record.tensors[name].dtype) for name in group
        }
        call = ""
        try:
            for tensors, key, name in slots:
                tensors[key] = real[name]
            with (
                untied(self._model),
                marked_uninitialized(self._model),
                torch.no_grad(),
                global_generator_unchanged(),
                KeepsNumbers(kept),
            ):
                torch.manual_seed(self._key(group[0], "computed") >> 1)
                for initializer, touched in self._record.calls:
                    if not touched.isdisjoint(group):
                        call = initializer.description
                        initializer.call()
            # An initialization may have put another tensor in the place of a parameter.
            return {name: tensors[key].detach().reshape(-1) for tensors, key, name in reversed(slots)}
        except Exception as error:
            raise ConfigError(f"{call} does not initialize {', '.join(group)}: {error}") from error
        finally:
            for (tensors, key, _), tensor in zip(slots, before, strict=True):
                tensors[key] = tensor


def _slots_of(model: nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[nn.Module, str, str]]]:
    """Where each tensor is: of which modules it is a parameter or buffer, with which key."""
    names = {storage_of(tensor): name for name, tensor in named.items()}
    slots: dict[str, list[tuple[nn.Module, str, str]]] = {name: [] for name in named}
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None and storage_of(tensor) in names:
                    slots[names[storage_of(tensor)]].append((module, kind, key))
    return slots


def _tensors_on_meta(model: nn.Module, names: Collection[str] | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if names is None:
        return {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    problems = [
        f"The model has no weight named {name!r}.{did_you_mean(name, tensors)}"
        if name not in tensors
        else f"{name} cannot be initialized: it is not on the meta device, but on {tensors[name].device}."
        for name in names
        if name not in tensors or not tensors[name].is_meta
    ]
    if problems:
        raise ConfigError(problems)
    return {name: tensor for name, tensor in tensors.items() if name in set(names)}


def _refuse_own_constructor(model: nn.Module) -> None:
    """A constructor that initializes modules in its own way cannot be asked again."""
    owner = next((module for module in model.modules() if initializes_in_constructor(module)), None)
    if owner is not None and not any(initializes_modules(module) for module in model.modules()):
        raise ConfigError(
            f"{type(owner).__name__} initializes itself in its constructor (`_init_weights`), which nobody watched: "
            "what it does is not known. Build it with ds_trainer.engine.loading.empty_model.empty_model."
        )


def _refuse(names: list[str], how: str) -> None:
    if names:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise ConfigError(
            f"Nothing initializes{how} {shown}: neither the constructor, nor `_init_weights` of the model, nor "
            "`reset_parameters()` of the module. Give the module a `reset_parameters()` that does, or build the model "
            "on the CPU."
        )


def _real(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the host in the place of ``like``; NaN, where its type has that."""
    real = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device="cpu")
    if isinstance(like, nn.Parameter):
        real = nn.Parameter(real, requires_grad=like.requires_grad)
    real.__dict__.update({key: item for key, item in like.__dict__.items() if key != "_is_hf_initialized"})
    return real


def _blocks_of(place: Place) -> Iterator[int]:
    """The blocks of the flattened whole tensor that hold an element of ``place``, each once."""
    seen: set[int] = set()
    for _, there in place.common(Place.whole(place.shape)):
        last = there.offset + (there.rows - 1) * there.stride + there.columns - 1
        for block in range(there.offset // BLOCK, last // BLOCK + 1):
            start, stop = block * BLOCK, (block + 1) * BLOCK
            first_row = max(0, -((there.offset + there.columns - 1 - start) // there.stride))
            if block not in seen and there.offset + first_row * there.stride < stop:
                seen.add(block)
                yield block


def _block_seed(key: int, block: int) -> int:
    """A seed of 32 bits (torch's generator on the CPU takes no more): no two blocks of a tensor have the same."""
    mixed = (block ^ key) & 0xFFFFFFFF
    for multiplier in (0x7FEB352D, 0x846CA68B):  # each step can be undone
        mixed ^= mixed >> 16
        mixed = mixed * multiplier & 0xFFFFFFFF
    return mixed ^ (mixed >> 15) ^ (key >> 32)

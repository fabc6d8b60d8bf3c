"""Initializes the weights of a new model shard by shard, with the distributions of the model's own initialization.

Values depend only on the seed and the tensor's name, so they are the same in every layout: a tensor is drawn in blocks
of its flattened elements, each with its own generator, and a rank draws the blocks that overlap its shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from ds_trainer.engine.loading.construction_record import construction_record
from ds_trainer.engine.loading.initialization import (
    all_tensors,
    global_generator_unchanged,
    initializes_in_constructor,
    initializes_modules,
    marked_uninitialized,
    untied,
)
from ds_trainer.engine.loading.initialization_record import (
    KeepValues,
    groups_of_computed,
    record_initialization,
    storage_of,
)
from ds_trainer.engine.loading.initialization_steps import Step, TensorRecord
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.errors import ConfigError, did_you_mean, listed

BLOCK = 2**16
"""Elements per block."""


class NewWeights:
    """A weight source that initializes tensors as ``model`` does (see weight_source.py).

    The initialization is ``reset_parameters()`` of every module that has it, followed by ``_init_weights`` of a
    transformers model. It runs once on the meta device, where it costs nothing, and its operations are repeated on each
    requested block, in the tensor's dtype. Tensors that cannot be initialized block by block (an orthogonal matrix, a
    computed table) are initialized whole on the host, one at a time.

    A shard costs the blocks that it overlaps: for a ZeRO-3 shard, at most two blocks more than its size. A slice along
    the columns of a matrix overlaps every row, so each of ``n`` ranks with such slices draws the whole matrix.

    Attributes:
        drawn: number of elements drawn so far.
    """

    def __init__(self, model: nn.Module, seed: int, names: Collection[str] | None = None) -> None:
        """Args:
            model: the model, with the tensors to initialize on the meta device. It is not changed.
            seed: seed of all values.
            names: names in ``named_parameters()`` and ``named_buffers()``; None for all tensors on meta.

        Raises:
            ConfigError: the model's initialization does not set some of them; the message lists all of them.
        """
        self.drawn = 0
        self._model = model
        self._seed = seed
        self._tensors = _tensors_on_meta(model, names)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self._slots = _slots_of(model, self._tensors)
        self._record = record_initialization(model, self._tensors)
        recorded = {
            name: record
            for name, tensor in self._tensors.items()
            if (record := construction_record(tensor)) is not None
        }
        if len(recorded) < len(self._tensors):
            _check_constructor(model)
        self._record.tensors |= recorded
        self._groups = groups_of_computed(self._record)
        self._computed: dict[str, torch.Tensor] = {}
        _check_all_initialized([name for name, tensor in self._record.tensors.items() if not tensor.initialized])

    def has(self, name: str) -> bool:
        """Whether this source holds the tensor."""
        return name in self._tensors

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        if name not in self._tensors:
            raise ConfigError(f"{name} is not one of the tensors to initialize.")
        if shard_slice.shape != self._shapes[name]:
            raise ConfigError(
                f"{name} has shape {self._shapes[name]} in the model, but shape {shard_slice.shape} was requested."
            )
        if name in self._groups:
            copy_common(target, shard_slice, self._compute(name), ShardSlice.whole(shard_slice.shape))
            return
        record = self._record.tensors[name]
        whole = ShardSlice.whole(shard_slice.shape)
        for index in _blocks_of(shard_slice):
            start, stop = index * BLOCK, min((index + 1) * BLOCK, record.numel)
            copy_common(target, shard_slice, self._draw(name, record, start, stop), whole.run(start, stop))

    def _draw(self, name: str, record: TensorRecord, start: int, stop: int) -> torch.Tensor:
        """Returns the elements ``[start, stop)`` (one block) of the flattened tensor."""
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
        """Returns the full flat tensor, initialized by the model; cached until another tensor is requested."""
        if name not in self._computed:
            self._computed = {}
            group = sorted(self._groups[name])
            self._computed = self._initialize(group)
            unset = [name for name, values in self._computed.items() if values.isnan().any()]
            _check_all_initialized(unset, " all elements of")
        return self._computed[name]

    def _initialize(self, group: list[str]) -> dict[str, torch.Tensor]:
        """Run the calls that initialize ``group`` with real tensors for the group and meta tensors otherwise."""
        slots = [(getattr(module, kind), key, name) for name in group for module, kind, key in self._slots[name]]
        before = [tensors.get(key) for tensors, key, _ in slots]
        existing = [tensor for tensor in all_tensors(self._model) if not tensor.is_meta]
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
                KeepValues(existing),
            ):
                torch.manual_seed(self._key(group[0], "computed") >> 1)
                for initializer, touched in self._record.calls:
                    if not touched.isdisjoint(group):
                        call = initializer.description
                        initializer.call()
            # An initialization may have replaced a parameter by another tensor.
            return {name: tensors[key].detach().reshape(-1) for tensors, key, name in reversed(slots)}
        except Exception as error:
            raise ConfigError(f"{call} failed to initialize {', '.join(group)}: {error}") from error
        finally:
            for (tensors, key, _), tensor in zip(slots, before, strict=True):
                tensors[key] = tensor


def _slots_of(model: nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[nn.Module, str, str]]]:
    """Returns the owners of each tensor: the modules, parameter or buffer dictionaries, and keys."""
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
        f"The model has no tensor named {name!r}.{did_you_mean(name, tensors)}"
        if name not in tensors
        else f"{name} cannot be initialized: it is on {tensors[name].device}, not on the meta device."
        for name in names
        if name not in tensors or not tensors[name].is_meta
    ]
    if problems:
        raise ConfigError(problems)
    return {name: tensor for name, tensor in tensors.items() if name in set(names)}


def _check_constructor(model: nn.Module) -> None:
    """Raise if the constructor initialized the modules and was not recorded: it cannot be repeated."""
    owner = next((module for module in model.modules() if initializes_in_constructor(module)), None)
    if owner is not None and not any(initializes_modules(module) for module in model.modules()):
        raise ConfigError(
            f"{type(owner).__name__} initializes itself in its constructor (`_init_weights`), which was not recorded. "
            "Build it with ds_trainer.engine.loading.empty_model.empty_model."
        )


def _check_all_initialized(uninitialized: list[str], extent: str = "") -> None:
    if uninitialized:
        raise ConfigError(
            f"Nothing initializes{extent} {listed(uninitialized, 10)}: neither the constructor, nor `_init_weights` "
            "of the model, nor `reset_parameters()` of the module. Add a `reset_parameters()` method that initializes "
            "them, or build the model on the CPU."
        )


def _real(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a host tensor that replaces ``like``, filled with NaN if its dtype supports it."""
    real = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device="cpu")
    if isinstance(like, nn.Parameter):
        real = nn.Parameter(real, requires_grad=like.requires_grad)
    real.__dict__.update({key: item for key, item in like.__dict__.items() if key != "_is_hf_initialized"})
    return real


def _blocks_of(shard_slice: ShardSlice) -> Iterator[int]:
    """Yields the blocks of the flattened whole tensor that overlap ``shard_slice``, each once."""
    seen: set[int] = set()
    for _, run in shard_slice.common(ShardSlice.whole(shard_slice.shape)):
        last = run.offset + (run.rows - 1) * run.stride + run.columns - 1
        for block in range(run.offset // BLOCK, last // BLOCK + 1):
            start, stop = block * BLOCK, (block + 1) * BLOCK
            first_row = max(0, -((run.offset + run.columns - 1 - start) // run.stride))
            if block not in seen and run.offset + first_row * run.stride < stop:
                seen.add(block)
                yield block


def _block_seed(key: int, block: int) -> int:
    """Returns a 32-bit seed (the limit of torch's CPU generator) that is unique among the blocks of a tensor."""
    mixed = (block ^ key) & 0xFFFFFFFF
    for multiplier in (0x7FEB352D, 0x846CA68B):  # each step is invertible
        mixed ^= mixed >> 16
        mixed = mixed * multiplier & 0xFFFFFFFF
    return mixed ^ (mixed >> 15) ^ (key >> 32)

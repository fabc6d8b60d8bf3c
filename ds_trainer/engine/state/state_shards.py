"""Reads an engine's state as shards of full tensors, and writes it back in any layout.

Exactly one rank provides each element of every master weight and optimizer state: under ZeRO the rank that holds it;
replicated tensors are divided among the data-parallel ranks. Weights with a master copy in the optimizer are not
included: rounding the master restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ds_trainer.engine.expert_parallel import weight_group
from ds_trainer.engine.state.buffers import Shapes, match_buffers, persistent_buffers
from ds_trainer.engine.state.cpu_adam import restore_bias_corrections
from ds_trainer.engine.state.flat_partitions import (
    FlatPartition,
    History,
    flat_partitions,
    parameter_slice,
    refresh_weights,
    zero_shard_slice,
)
from ds_trainer.engine.state.state_devices import on_device, scalar_for_optimizer
from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.parallel.shard_slices import ShardSlice

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

MASTER, WEIGHT, BUFFER = "master", "weight", "buffer"
"""Kinds in addition to the keys of an optimizer's state: stepped parameters, other parameters, and buffers."""

MAX_WRITERS = 16
"""At most this many ranks write replicated tensors, because each rank opens all of their files to read them back."""


class StateShard(NamedTuple):
    """``len(slice)`` elements of a tensor: flat, on any device, read-only.

    A shard without elements only records that the tensor has this kind of state: a rank that holds nothing but padding
    needs to know it.
    """

    name: str
    kind: str
    slice: ShardSlice
    tensor: torch.Tensor


class StateShards(NamedTuple):
    """State shards that fit into memory together.

    Attributes:
        tensors: shards of tensors.
        scalars: optimizer states that are one number per parameter: ``{parameter: {key: value}}``.
        extras: states whose shape differs from their parameter's, by the name of the first fragment of their partition.
            They can be restored into the same layout only.
    """

    tensors: list[StateShard]
    scalars: dict[str, dict[str, Any]]
    extras: dict[str, dict[str, Any]]


class StateSource(Protocol):
    """Where shards are read from."""

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """The kinds of state of a parameter or buffer, with their dtypes."""

    def fill(self, name: str, kind: str, shard_slice: ShardSlice, target: torch.Tensor, /) -> None:
        """Reads elements into ``target``, a flat tensor of ``len(shard_slice)`` elements."""

    def scalars(self, name: str) -> dict[str, Any]:
        """States of a parameter that are one number."""

    def extras(self, name: str) -> dict[str, Any]:
        """States of another shape, which this rank wrote in the same layout."""

    def buffers(self) -> Shapes:
        """Shapes and dtypes of the persistent buffers that this rank restores."""


def read_state_shards(engine: TrainingEngine, exclude: Collection[str] = ()) -> Iterator[StateShards]:
    """Yields this rank's state shards. Tensors are the engine's and valid until the next iteration.

    States that DeepSpeed has swapped out are yielded one sub-group at a time.

    Args:
        engine: the engine.
        exclude: names of parameters without an optimizer to omit.

    Raises:
        UnknownState: the state layout of DeepSpeed's optimizer is not supported.
    """
    partitions = flat_partitions(engine.deepspeed, engine.groups.coordinates.tp)
    resident = [partition for partition in partitions if partition.tensor.numel() == partition.numel]
    first = StateShards(list(_not_stepped(engine, partitions, exclude)), {}, {})
    scalar_keys = scalar_state_keys((partition.tensor, partition.states) for partition in partitions)
    for partition in resident:
        _read_partition(engine, partition, scalar_keys, first)
    yield first
    for partition in partitions:
        if partition.tensor.numel() != partition.numel:
            with partition.present(False):
                swapped_in = StateShards([], {}, {})
                _read_partition(engine, partition, scalar_keys, swapped_in)
                yield swapped_in


def _read_partition(engine: TrainingEngine, partition: FlatPartition, scalar_keys: set[str], into: StateShards) -> None:
    states = elementwise(partition.tensor, partition.states, scalar_keys)
    others = {key: value for key, value in partition.states.items() if key not in states}
    scalars = {key: value for key, value in others.items() if _is_scalar(value)}
    histories = partition.histories or [History(scalars, True)] * len(partition.fragments)
    for fragment, history in zip(partition.fragments, histories, strict=True):
        if history.scalars:
            into.scalars[fragment.name] = history.scalars
        if not _writes(engine, fragment.parameter):
            continue
        written = _written_part(engine, fragment.parameter, fragment.slice) if partition.replicated else fragment.slice
        start = fragment.offset + written.start - fragment.slice.start
        for kind, tensor in {MASTER: partition.tensor, **(states if history.began else {})}.items():
            flat = tensor.detach().reshape(-1)[start : start + len(written)]
            into.tensors.append(StateShard(fragment.name, kind, written, flat))
    extras = {key: value for key, value in others.items() if key not in scalars}
    if extras and partition.fragments:
        into.extras[partition.fragments[0].name] = extras


def frozen_names(engine: TrainingEngine) -> frozenset[str]:
    """Names of the frozen parameters, which no rank's optimizer steps. The same on all ranks.

    Raises:
        UnknownState: the state layout of DeepSpeed's optimizer is not supported.
    """
    stepped = _stepped(engine, flat_partitions(engine.deepspeed, engine.groups.coordinates.tp))
    named = engine.deepspeed.module.named_parameters()
    return frozenset(name for name, one in named if id(one) not in stepped and not one.requires_grad)


def frozen_shards(engine: TrainingEngine, names: Collection[str]) -> list[StateShard]:
    """This rank's shards of the frozen parameters ``names`` (see :func:`frozen_names`); tensors are the engine's."""
    parameters = engine.deepspeed.module.named_parameters()
    return list(_weights(engine, ((name, parameter) for name, parameter in parameters if name in names)))


def _not_stepped(
    engine: TrainingEngine, partitions: list[FlatPartition], exclude: Collection[str]
) -> Iterator[StateShard]:
    """Parameters that no optimizer steps, without those in ``exclude``, and buffers, which every rank has."""
    model, stepped = engine.deepspeed.module, _stepped(engine, partitions)
    named = model.named_parameters()
    yield from _weights(engine, ((name, p) for name, p in named if id(p) not in stepped and name not in exclude))
    for name, buffer in persistent_buffers(model):
        yield StateShard(name, BUFFER, ShardSlice.whole(buffer.shape), buffer.detach().reshape(-1))


def _weights(engine: TrainingEngine, named: Iterable[tuple[str, Any]]) -> Iterator[StateShard]:
    for name, parameter in named:
        held = parameter_slice(parameter, engine.groups.coordinates.tp)
        if not _writes(engine, parameter):
            continue
        if hasattr(parameter, "ds_tensor"):
            shard = zero_shard_slice(parameter, engine.groups.coordinates.tp)
            yield StateShard(name, WEIGHT, shard, parameter.ds_tensor.detach().view(-1)[: len(shard)])
        else:
            part = _written_part(engine, parameter, held)
            yield StateShard(name, WEIGHT, part, parameter.detach().reshape(-1)[part.start : part.stop])


def _stepped(engine: TrainingEngine, partitions: list[FlatPartition]) -> set[int]:
    return {
        id(fragment.parameter) for partition in partitions for fragment in partition.fragments
    } | _stepped_elsewhere(engine)


def _stepped_elsewhere(engine: TrainingEngine) -> set[int]:
    """Parameters in ZeRO's groups, including those whose masters are entirely on other ranks."""
    wrapper: Any = engine.deepspeed.optimizer
    groups = getattr(wrapper, "bit16_groups", None) or getattr(wrapper, "bf16_groups", None) or []
    return {id(parameter) for group in groups for parameter in group}


def changed_only_by_steps(engine: TrainingEngine) -> Callable[[StateShard], bool]:
    """Returns a predicate for shards that only optimizer steps change: they do not share memory with the model."""
    model = engine.deepspeed.module
    storages: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        storages.update(t.untyped_storage().data_ptr() for t in (tensor, getattr(tensor, "ds_tensor", tensor)))
    return lambda shard: shard.kind != BUFFER and shard.tensor.untyped_storage().data_ptr() not in storages


def all_in_memory(engine: TrainingEngine) -> bool:
    """Whether the full state is in memory, with nothing swapped out by DeepSpeed."""
    return all(
        partition.tensor.numel() == partition.numel
        for partition in flat_partitions(engine.deepspeed, engine.groups.coordinates.tp)
    )


def _writes(engine: TrainingEngine, parameter: torch.Tensor) -> bool:
    """Whether this rank writes ``parameter``: only the first tensor-parallel rank writes replicated ones."""
    return is_sliced(parameter) or engine.groups.coordinates.tp == 0


def _written_part(engine: TrainingEngine, parameter: torch.Tensor, held: ShardSlice) -> ShardSlice:
    """The part of a replicated tensor that this rank writes; without elements if it is not a writer."""
    group = weight_group(parameter, engine.groups)
    writers = replicated_writers(group.size())
    if group.rank() not in writers:
        return held.run(held.start, held.start)
    return held.part(writers.index(group.rank()), len(writers))


def replicated_writers(ranks: int) -> list[int]:
    """The indices of the ranks that write replicated tensors, out of ``ranks``, spread over the machines.

    Reading needs the parts of all writers, so their number must not grow with the number of ranks.
    """
    writers = min(ranks, MAX_WRITERS)
    return [index * ranks // writers for index in range(writers)]


_TORCH_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})  # all optimizers; ASGD; NAdam


def scalar_state_keys(stepped: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> set[str]:
    """Keys of an optimizer's states that are one number per parameter.

    For a zero-dimensional parameter a moving average looks like such a number, so only other parameters are examined.
    If all parameters are zero-dimensional, the keys of torch's optimizers are used.

    Args:
        stepped: each tensor that the optimizer steps, with its states.
    """
    seen: dict[str, bool] = {}
    for tensor, states in stepped:
        if tensor.dim():
            seen.update({key: value.dim() == 0 for key, value in states.items() if isinstance(value, torch.Tensor)})
    return {key for key, is_scalar in seen.items() if is_scalar} | (_TORCH_SCALARS - seen.keys())


def elementwise(tensor: torch.Tensor, states: Mapping[str, Any], scalar_keys: set[str]) -> dict[str, torch.Tensor]:
    """The entries of ``states`` with one number per element of ``tensor``; ``scalar_keys`` have one per tensor."""
    same = {k: v for k, v in states.items() if type(v) is torch.Tensor and v.shape == tensor.shape and k != "step"}
    return {key: value for key, value in same.items() if value.dim() or key not in scalar_keys}


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, str))


def write_state_shards(engine: TrainingEngine, source: StateSource, exclude: Collection[str] = ()) -> None:
    """Replaces the engine's state with that of ``source``. Collective.

    States that the source lacks for some parameters of a partition (without a gradient so far) become zero; a partition
    for which the source has no states gets none.

    Args:
        engine: the engine.
        source: the new state.
        exclude: names of parameters without an optimizer that stay unchanged.

    Raises:
        ConfigError: the source lacks something that this layout needs.
    """
    wrapper: Any = engine.deepspeed.optimizer
    sharded = hasattr(wrapper, "checkpoint_event_prologue")  # releases persistent parameters for the duration
    if sharded:
        wrapper.checkpoint_event_prologue()
    partitions = flat_partitions(engine.deepspeed, engine.groups.coordinates.tp)
    with torch.no_grad():
        for partition in partitions:
            with partition.present(True):
                _write_partition(partition, source)
        _write_not_stepped(engine, partitions, source, exclude)
    restore_bias_corrections(partitions)
    engine.unused_parameters.steps.restored()
    refresh_weights(engine.deepspeed)
    if sharded:
        wrapper.checkpoint_event_epilogue()


def _write_partition(partition: FlatPartition, source: StateSource) -> None:
    for fragment in partition.fragments:
        kind = MASTER if MASTER in source.kinds(fragment.name) else WEIGHT  # it was saved as a frozen parameter
        _fill(partition.tensor, fragment.offset, source, fragment.name, kind, fragment.slice)
    kinds: dict[str, torch.dtype] = {}
    histories: list[History] = []
    for fragment in partition.fragments:
        own = {k: d for k, d in source.kinds(fragment.name).items() if k not in (MASTER, WEIGHT, BUFFER)}
        kinds.update(own)
        scalars = source.scalars(fragment.name)
        same = (one for one in histories if one.scalars == scalars and one.began == bool(own or scalars))
        histories.append(next(same, None) or History(scalars, bool(own or scalars)))
    states = partition.states
    for kind, dtype in kinds.items():
        present = states.get(kind)
        if isinstance(present, torch.Tensor) and present.shape == partition.tensor.shape:
            present.zero_()
        else:
            states[kind] = present = torch.zeros_like(partition.tensor, dtype=dtype, requires_grad=False)
        for fragment in partition.fragments:
            if kind in source.kinds(fragment.name):
                _fill(present, fragment.offset, source, fragment.name, kind, fragment.slice)
    for history in dict.fromkeys(sorted(histories, key=lambda one: one.began)):
        history.scalars = {k: scalar_for_optimizer(partition, k, value) for k, value in history.scalars.items()}
        states.update(history.scalars)
    if any(history.began for history in histories):  # not weights alone
        partition.histories = histories if len(set(histories)) > 1 else None
    if partition.fragments:
        states.update(on_device(source.extras(partition.fragments[0].name), partition.tensor.device))


def _fill(tensor: torch.Tensor, offset: int, source: StateSource, name: str, kind: str, held: ShardSlice) -> None:
    """Fills elements of the flattened ``tensor``, starting at ``offset``."""
    flat = tensor.detach().reshape(-1)  # a copy if the tensor is not contiguous
    source.fill(name, kind, held, flat[offset : offset + len(held)])
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def _write_not_stepped(
    engine: TrainingEngine, partitions: list[FlatPartition], source: StateSource, exclude: Collection[str]
) -> None:
    model, stepped = engine.deepspeed.module, _stepped(engine, partitions)
    for name, parameter in model.named_parameters():
        if id(parameter) in stepped or name in exclude:
            continue
        kind = WEIGHT if WEIGHT in source.kinds(name) else MASTER
        if hasattr(parameter, "ds_tensor"):
            shard = zero_shard_slice(parameter, engine.groups.coordinates.tp)
            _fill(parameter.ds_tensor, 0, source, name, kind, shard)
            parameter.ds_secondary_tensor = None  # hpZ's copy; DeepSpeed drops those of stepped weights only
        else:
            _fill(parameter, 0, source, name, kind, parameter_slice(parameter, engine.groups.coordinates.tp))
    lacking = match_buffers(model, source.buffers(), exclude)
    for name, buffer in persistent_buffers(model):
        if name in lacking or (name in exclude and BUFFER not in source.kinds(name)):
            continue  # adapters were saved without their base model
        _fill(buffer, 0, source, name, BUFFER, ShardSlice.whole(buffer.shape))

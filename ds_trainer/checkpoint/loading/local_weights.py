"""The shards of a model's tensors that this rank holds, in any layout, and samples of their elements."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ds_trainer.checkpoint.weights.element_tracer import Indices
from ds_trainer.engine.state.buffers import persistent_buffers
from ds_trainer.engine.state.flat_partitions import FlatPartition, flat_partitions, parameter_slice, zero_shard_slice
from ds_trainer.engine.weights import full_shape, without_adapters
from ds_trainer.parallel.shard_slices import ShardSlice

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

RUN = 64
"""Consecutive elements in one sample."""
RUNS = 4
"""Minimum number of samples at random positions of a tensor, in addition to one at each end of the local shard."""
MAX_RUNS = 4096
SAMPLERS = 8
"""Minimum number of ranks with shards of a tensor that sample it, if there are as many."""
LEAST = 8
"""Tensors that every rank samples at least."""


@dataclass
class ModelTensor:
    """A parameter or persistent buffer of a model.

    Attributes:
        names: its names in the model's files, first the model's own name; a tied weight has several.
        tensor: the tensor in the model.
        shape: full shape.
        is_buffer: it is a buffer.
        is_new: it belongs to an adapter, not to the loaded model.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    is_buffer: bool = False
    is_new: bool = False


@dataclass
class LocalShard:
    """Elements of a tensor that this rank holds.

    Attributes:
        tensor: the tensor.
        slice: the elements of the tensor.
        kind: ``"weight"`` for the weights of the forward pass, ``"master"`` for the master weights of the optimizer.
        memory: the tensor that stores the elements, in order, starting at index :attr:`first`.
        first: index of the first element in ``memory``.
        present: returns a context in which the elements are in memory; None if they always are.
    """

    tensor: ModelTensor
    slice: ShardSlice
    kind: str
    memory: Any
    first: int = 0
    present: Callable[[], AbstractContextManager[None]] | None = None

    def take(self, at: torch.Tensor) -> torch.Tensor:
        """Returns the elements at positions ``at`` (a tensor on the device of ``memory``) as bytes."""
        memory = self.memory.detach()
        flat = memory.view(-1) if memory.is_contiguous() else memory.reshape(-1)
        return flat[at + self.first if self.first else at].contiguous().view(torch.uint8)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Returns all parameters and persistent buffers, each once."""
    added = _added_by_adapters(model)
    base = without_adapters(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    entries: dict[int, ModelTensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = entries.setdefault(id(parameter), ModelTensor([], parameter, full_shape(parameter)))
        if id(parameter) in added or not name.startswith(prefix):
            entry.is_new = True
        entry.names.append(_in_file(name, prefix))
    for name, buffer in persistent_buffers(model):
        entry = ModelTensor([_in_file(name, prefix)], buffer, tuple(buffer.shape), is_buffer=True)
        entries.setdefault(id(buffer), entry)
    return list(entries.values())


def _added_by_adapters(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that peft's layers add to the wrapped ones."""
    added: set[int] = set()
    for module in model.modules():
        wraps = hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")
        wraps = wraps or (hasattr(module, "original_module") and hasattr(module, "active_adapters"))
        if wraps:
            inner: Any = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
            wrapped = {id(parameter) for parameter in inner.parameters()}
            added.update(id(parameter) for parameter in module.parameters() if id(parameter) not in wrapped)
    return added


def _in_file(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).replace(".base_layer.", ".").replace(".original_module.", ".")


def local_weights(tensors: Sequence[ModelTensor], tp_rank: int) -> Iterator[LocalShard]:
    """Yields the local elements of the weights of the forward pass; under ZeRO-3, this rank's shards."""
    for entry in tensors:
        parameter: Any = entry.tensor
        if entry.is_buffer:
            yield LocalShard(entry, ShardSlice.whole(entry.shape), "weight", parameter)
        elif hasattr(parameter, "ds_tensor"):
            shard = zero_shard_slice(parameter, tp_rank)
            swapped = parameter.ds_tensor.numel() < len(shard)
            present = partial(_swapped_in, parameter) if swapped else None
            yield LocalShard(entry, shard, "weight", parameter.ds_tensor, present=present)
        else:
            yield LocalShard(entry, parameter_slice(parameter, tp_rank), "weight", parameter)


@contextmanager
def _swapped_in(parameter: Any) -> Iterator[None]:
    """Swap a shard from NVMe into memory inside the block."""
    swapper = parameter.nvme_swapper
    swapper.swap_in([parameter], async_op=False)
    try:
        yield
    finally:
        swapper.remove_partition_and_release_buffers([parameter])


def local_masters(tensors: Sequence[ModelTensor], engine: DeepSpeedEngine, tp_rank: int) -> Iterator[LocalShard]:
    """Yields the local master weights, where they are not the model's own memory.

    Raises:
        UnknownState: the state layout of this DeepSpeed optimizer is not known.
    """
    by_parameter = {id(entry.tensor): entry for entry in tensors}
    for partition in flat_partitions(engine, tp_rank):
        present = None if partition.tensor.numel() == partition.numel else partial(partition.present, False)
        for fragment in partition.fragments:
            entry = by_parameter.get(id(fragment.parameter))
            if (
                entry is None or partition.tensor is fragment.parameter
            ):  # an adapter, which no file has; or compared already
                continue
            yield LocalShard(entry, fragment.slice, "master", _SwappedMemory(partition), fragment.offset, present)


class _SwappedMemory:
    """The memory of a flat partition, which can change when the partition is swapped in."""

    def __init__(self, partition: FlatPartition) -> None:
        self._partition = partition

    def detach(self) -> torch.Tensor:
        return self._partition.tensor.detach()

    @property
    def dtype(self) -> torch.dtype:
        return self._partition.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._partition.tensor.device


def sampling(held: Sequence[LocalShard], sources: Sequence[int], rank: int, ranks: int) -> list[bool]:
    """Returns for each entry whether this rank samples it, or only the ends of the tensor that it has.

    The ranks that sample a tensor are evenly spread, others for each tensor; their number does not grow with the
    ranks, so that a thousand ranks do not read a thousand times as much of the files. Each rank samples a few tensors.

    Args:
        held: elements on this rank, sorted by tensor.
        sources: see :func:`sampled_positions`.
        rank: position of this rank among those that share the elements, or have the same.
        ranks: their number.
    """
    chosen = []
    for part, stored in zip(held, sources, strict=True):
        every = -(-ranks // max(SAMPLERS, _wanted(part, stored)))
        chosen.append((rank + zlib.crc32(part.tensor.names[0].encode())) % every == 0)
    for kind in {part.kind for part in held}:
        own = [number for number, part in enumerate(held) if part.kind == kind]
        step = max(1, len(own) // LEAST)
        for number in own[rank % step :: step]:
            chosen[number] = True
    return chosen


def ends_of_tensor(held: LocalShard) -> Indices:
    """Returns the positions of the first and the last elements of the slice that is sharded, if this rank has them."""
    size, whole = len(held.slice), held.slice.slice_numel
    ends = [np.arange(min(RUN, size))] if held.slice.start == 0 else []
    ends += [np.arange(max(0, size - RUN), size)] if held.slice.start + size == whole else []
    return np.unique(np.concatenate(ends)) if ends and size < whole else np.arange(0)


def _wanted(held: LocalShard, sources: int) -> int:
    """Samples of a whole tensor."""
    rows = held.tensor.shape[0] if len(held.tensor.shape) > 2 else 1
    return max(RUNS, 2 * sources, 2 * rows, RUNS * len(held.slice.bands))


def sampled_positions(held: LocalShard, sources: int, seed: int) -> Indices:
    """Returns positions within the local elements, ascending: runs at both ends and one in each of several parts.

    Args:
        held: elements on this rank.
        sources: number of stored tensors that the whole tensor consists of; each is sampled if a rank holds all of it.
        seed: ranks that hold the same elements sample different positions when their seeds differ.
    """
    size, whole = len(held.slice), max(1, held.slice.slice_numel)
    parts = min(MAX_RUNS, max(RUNS, math.ceil(_wanted(held, sources) * size / whole)))
    if size <= (parts + 2) * RUN:
        return np.arange(size)
    random = np.random.default_rng([zlib.crc32(held.tensor.names[0].encode()), seed])
    edges = np.arange(parts, dtype=np.int64) * size // parts
    widths = np.diff(np.append(edges, size))
    starts = edges + (random.random(parts) * np.maximum(1, widths - RUN + 1)).astype(np.int64)
    starts = np.concatenate([[0], starts, [size - RUN]])
    return np.unique(np.minimum(starts[:, None] + np.arange(RUN), size - 1))


def whole_indices(shard_slice: ShardSlice, positions: Indices) -> Indices:
    """Converts positions within ``shard_slice`` to indices of the flattened whole tensor."""
    positions = positions + shard_slice.start
    if shard_slice.dim is None:
        return positions
    axes = [np.array(axis) for axis in np.unravel_index(positions, shard_slice.slice_shape)]
    along = axes[shard_slice.dim]
    ends = np.cumsum([length for _, length in shard_slice.bands])
    band = np.searchsorted(ends, along, side="right")
    firsts = np.asarray([first for first, _ in shard_slice.bands])
    begins = np.concatenate([[0], ends[:-1]])
    axes[shard_slice.dim] = along - begins[band] + firsts[band]
    return np.asarray(np.ravel_multi_index(axes, shard_slice.shape), dtype=np.int64)


def sample(held: Sequence[LocalShard], positions: Sequence[Indices]) -> list[torch.Tensor]:
    """Returns the elements at ``positions`` of each entry of ``held``, on the host as float64.

    Elements that are in memory are copied to the host in one transfer per device.
    """
    samples: list[torch.Tensor] = [torch.empty(0)] * len(held)
    together: dict[int, list[int]] = {}  # those in memory first; then those that are swapped in, in order
    for number, part in enumerate(held):
        together.setdefault(id(part.present), []).append(number)
    for numbers in together.values():
        present = held[numbers[0]].present
        with nullcontext() if present is None else present():
            by_device: dict[torch.device, list[int]] = {}
            for number in numbers:
                by_device.setdefault(held[number].memory.device, []).append(number)
            for device, on_device in by_device.items():
                for number, values in zip(on_device, _to_host(device, held, positions, on_device), strict=True):
                    samples[number] = values
    return samples


def _to_host(
    device: torch.device, held: Sequence[LocalShard], positions: Sequence[Indices], numbers: Sequence[int]
) -> Iterator[torch.Tensor]:
    lengths = [len(positions[number]) for number in numbers]
    at = torch.from_numpy(np.concatenate([positions[number] for number in numbers])).to(device).split(lengths)
    chunks = [held[number].take(part) for number, part in zip(numbers, at, strict=True)]
    sizes = [chunk.numel() for chunk in chunks]
    for number, data in zip(numbers, torch.cat(chunks).cpu().split(sizes), strict=True):
        # A chunk may start at any byte; the clone has the alignment that its dtype requires.
        yield data.clone().view(held[number].memory.dtype).to(torch.float64)

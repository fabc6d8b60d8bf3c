"""What this rank holds of a model, tensor by tensor, in any layout, and samples of it."""

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

from ds_trainer.checkpoint.loading.element_origins import Indices
from ds_trainer.engine.state.pieces import persistent_buffers
from ds_trainer.engine.state.units import Unit, place_of, shard_place, units_of
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.places import Place

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

RUN = 64
"""Neighboring elements in a sample."""
RUNS = 4
"""Samples of a tensor at random positions, at least; besides there is one at each end of what a rank holds."""
MOST_RUNS = 4096


@dataclass
class ModelTensor:
    """A parameter or persistent buffer of a model.

    Attributes:
        names: all that it is called in a file of the model (tied weights have several), first the model's own.
        tensor: as it is in the model.
        shape: of the whole tensor.
        is_new: belongs to an adapter and not to the model that was loaded.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    is_buffer: bool = False
    is_new: bool = False


@dataclass
class Held:
    """Elements of a tensor that are on this rank.

    Attributes:
        tensor: which one.
        place: which of its elements.
        kind: ``"weight"`` for what forward passes use, ``"master"`` for what the optimizer steps.
        memory: holds them, from :attr:`first` on in the order of its indices.
        present: makes a context in which they are in memory; None where they are without anybody's doing.
    """

    tensor: ModelTensor
    place: Place
    kind: str
    memory: Any
    first: int = 0
    present: Callable[[], AbstractContextManager[None]] | None = None

    def take(self, at: torch.Tensor) -> torch.Tensor:
        """The elements ``at`` (on the device of the memory), as bytes."""
        memory = self.memory.detach()
        flat = memory.view(-1) if memory.is_contiguous() else memory.reshape(-1)
        return flat[at + self.first if self.first else at].contiguous().view(torch.uint8)


def base_model(model: Any) -> Any:
    """The model that was loaded, without the wrapper that peft puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") and hasattr(model, "peft_config") else model


def tensors_of(model: nn.Module) -> list[ModelTensor]:
    """All parameters and persistent buffers, each once."""
    added = _added_by_adapters(model)
    prefix = _prefix_of(model, base_model(model))
    found: dict[int, ModelTensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = found.setdefault(id(parameter), ModelTensor([], parameter, full_shape(parameter)))
        if id(parameter) in added or not name.startswith(prefix):
            entry.is_new = True
        entry.names.append(_in_file(name, prefix))
    for name, buffer in persistent_buffers(model):
        entry = ModelTensor([_in_file(name, prefix)], buffer, tuple(buffer.shape), is_buffer=True)
        found.setdefault(id(buffer), entry)
    return list(found.values())


def _added_by_adapters(model: nn.Module) -> set[int]:
    """The parameters that peft's layers add to those they wrap."""
    added: set[int] = set()
    for module in model.modules():
        wraps = hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")
        wraps = wraps or (hasattr(module, "original_module") and hasattr(module, "active_adapters"))
        if wraps:
            inner: Any = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
            kept = {id(parameter) for parameter in inner.parameters()}
            added.update(id(parameter) for parameter in module.parameters() if id(parameter) not in kept)
    return added


def _prefix_of(model: nn.Module, base: nn.Module) -> str:
    if base is model:
        return ""
    return next((f"{name}." for name, module in model.named_modules() if module is base), "")


def _in_file(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).replace(".base_layer.", ".").replace(".original_module.", ".")


def held_weights(tensors: Sequence[ModelTensor], tp_rank: int) -> Iterator[Held]:
    """What forward passes use, of which ZeRO-3 leaves each rank its shard."""
    for entry in tensors:
        parameter: Any = entry.tensor
        if entry.is_buffer:
            yield Held(entry, Place.whole(entry.shape), "weight", parameter)
        elif hasattr(parameter, "ds_tensor"):
            shard = shard_place(parameter, tp_rank)
            swapped = parameter.ds_tensor.numel() < len(shard)
            present = partial(_read_back, parameter) if swapped else None
            yield Held(entry, shard, "weight", parameter.ds_tensor, present=present)
        else:
            yield Held(entry, place_of(parameter, tp_rank), "weight", parameter)


@contextmanager
def _read_back(parameter: Any) -> Iterator[None]:
    """A shard that is kept on NVMe, in memory for a while."""
    swapper = parameter.nvme_swapper
    swapper.swap_in([parameter], async_op=False)
    try:
        yield
    finally:
        swapper.remove_partition_and_release_buffers([parameter])


def held_masters(tensors: Sequence[ModelTensor], engine: DeepSpeedEngine, tp_rank: int) -> Iterator[Held]:
    """What the optimizer steps, where that is not the model's own memory.

    Raises:
        UnknownState: DeepSpeed's optimizer is none whose state is known.
    """
    by_parameter = {id(entry.tensor): entry for entry in tensors}
    for unit in units_of(engine, tp_rank):
        present = None if unit.tensor.numel() == unit.numel else partial(unit.present, False)
        for member in unit.members:
            entry = by_parameter.get(id(member.parameter))
            if entry is None or unit.tensor is member.parameter:  # of no file, as an adapter's; or compared already
                continue
            yield Held(entry, member.place, "master", _Late(unit), member.offset, present)


class _Late:
    """The memory of a unit, which may be another one when it has been swapped in."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def detach(self) -> torch.Tensor:
        return self._unit.tensor.detach()

    @property
    def dtype(self) -> torch.dtype:
        return self._unit.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._unit.tensor.device


def sampled_positions(held: Held, sources: int, seed: int) -> Indices:
    """Positions within what is held, ascending: runs at both ends, and at random places in equal parts.

    Args:
        held: elements on this rank.
        sources: tensors in the files that the whole tensor is made of; each is met where a rank holds all of it.
        seed: ranks that hold the same look at other positions with other seeds.
    """
    size, whole = len(held.place), max(1, held.place.slice_numel)
    rows = held.tensor.shape[0] if len(held.tensor.shape) > 2 else 1
    wanted = max(RUNS, 2 * sources, 2 * rows, RUNS * len(held.place.bands))
    parts = min(MOST_RUNS, max(RUNS, math.ceil(wanted * size / whole)))
    if size <= (parts + 2) * RUN:
        return np.arange(size)
    random = np.random.default_rng([zlib.crc32(held.tensor.names[0].encode()), seed])
    edges = np.arange(parts, dtype=np.int64) * size // parts
    widths = np.diff(np.append(edges, size))
    starts = edges + (random.random(parts) * np.maximum(1, widths - RUN + 1)).astype(np.int64)
    starts = np.concatenate([[0], starts, [size - RUN]])
    return np.unique(np.minimum(starts[:, None] + np.arange(RUN), size - 1))


def whole_indices(place: Place, positions: Indices) -> Indices:
    """Positions within ``place`` as indices of the flattened whole tensor."""
    positions = positions + place.start
    if place.dim is None:
        return positions
    axes = [np.array(axis) for axis in np.unravel_index(positions, place.slice_shape)]
    along = axes[place.dim]
    ends = np.cumsum([length for _, length in place.bands])
    band = np.searchsorted(ends, along, side="right")
    firsts = np.asarray([first for first, _ in place.bands])
    begins = np.concatenate([[0], ends[:-1]])
    axes[place.dim] = along - begins[band] + firsts[band]
    return np.asarray(np.ravel_multi_index(axes, place.shape), dtype=np.int64)


def sample(held: Sequence[Held], positions: Sequence[Indices]) -> list[torch.Tensor]:
    """The elements at ``positions`` of each of ``held``, on the host in float64.

    All that lies in memory is copied to the host at once, one copy for each device.
    """
    taken: list[torch.Tensor] = [torch.empty(0)] * len(held)
    together: dict[int, list[int]] = {}  # what is in memory; what is not, in the order in which it is brought there
    for number, part in enumerate(held):
        together.setdefault(id(part.present), []).append(number)
    for numbers in together.values():
        present = held[numbers[0]].present
        with nullcontext() if present is None else present():
            by_device: dict[torch.device, list[int]] = {}
            for number in numbers:
                by_device.setdefault(held[number].memory.device, []).append(number)
            for device, there in by_device.items():
                for number, values in zip(there, _to_host(device, held, positions, there), strict=True):
                    taken[number] = values
    return taken


def _to_host(
    device: torch.device, held: Sequence[Held], positions: Sequence[Indices], numbers: Sequence[int]
) -> Iterator[torch.Tensor]:
    lengths = [len(positions[number]) for number in numbers]
    at = torch.from_numpy(np.concatenate([positions[number] for number in numbers])).to(device).split(lengths)
    pieces = [held[number].take(part) for number, part in zip(numbers, at, strict=True)]
    sizes = [piece.numel() for piece in pieces]
    for number, data in zip(numbers, torch.cat(pieces).cpu().split(sizes), strict=True):
        # A piece may begin at any byte, and its type wants its own alignment.
        yield data.clone().view(held[number].memory.dtype).to(torch.float64)

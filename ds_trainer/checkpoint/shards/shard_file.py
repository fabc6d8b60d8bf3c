"""Shards of tensors in a file: the safetensors format, with the slice of each shard in its metadata.

One rank writes one file, and one more for each group of states that DeepSpeed had swapped out. Any safetensors reader
can open it. The metadata entry ``places`` tells which elements of which tensor a shard holds. A shard whose elements
are bit for bit in the model's weight files is not written a second time: ``in_model`` tells where the whole tensor is
stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from ds_trainer.checkpoint.shards.element_types import TYPES, type_of
from ds_trainer.checkpoint.shards.model_plan import TensorLocation
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.files import parse_json

_CHUNK = 16 * 2**20  # bytes written at a time
_SLICES = "places"  # the name that format 1 of the checkpoints has for them


def shard_key(name: str, kind: str) -> str:
    """Returns the name of a shard in its file. A rank has one shard per tensor and kind."""
    return f"{name}/{kind}"


LocateInModel = Callable[[StateShard], TensorLocation | None]
"""Returns where the model's files hold the elements of a shard; None if they do not."""


def not_in_model(shard: StateShard) -> None:
    """The :data:`LocateInModel` of a checkpoint without a model."""


class ShardFilePlan(NamedTuple):
    """The contents of a shard file, and of this rank's part of the model's files.

    Attributes:
        header: the first bytes of the file.
        shards: in order and without gaps: first those that the file holds, then those that only the model's files hold.
        written: bytes of the elements in the file.
        size: bytes of all shards.
        in_model: for each shard that goes into the model's files: its location there, the shard, and its offset in
            memory if all shards follow each other.
    """

    header: bytes
    shards: list[StateShard]
    written: int
    size: int
    in_model: list[tuple[TensorLocation, StateShard, int]]


def plan_shard_file(
    shards: Sequence[StateShard], scalars: Mapping[str, Mapping[str, Any]], locate: LocateInModel = not_in_model
) -> ShardFilePlan:
    """Returns the plan of a file with these shards.

    Reads the values of ``scalars`` now, but only types and sizes of tensors.

    Raises:
        ValueError: a tensor has a type that safetensors cannot hold.
    """
    locations = {shard_key(s.name, s.kind): location for s in shards if (location := locate(s)) is not None}

    def only_in_model(shard: StateShard) -> bool:
        location = locations.get(shard_key(shard.name, shard.kind))
        return location is not None and location.dtype == shard.tensor.dtype

    # Wide types first, so that every tensor is aligned to its own type.
    ordered = sorted(shards, key=lambda shard: (only_in_model(shard), -shard.tensor.element_size()))
    metadata = {
        "format": "pt",
        _SLICES: json.dumps({shard_key(s.name, s.kind): s.slice.to_json() for s in ordered}),
        "scalars": json.dumps(
            {name: {key: _scalar_to_json(value) for key, value in of.items()} for name, of in scalars.items()}
        ),
    }
    elsewhere = {key: locations[key] for s in ordered if only_in_model(s) for key in (shard_key(s.name, s.kind),)}
    if elsewhere:
        metadata["in_model"] = json.dumps({key: [f, offset, TYPES[t]] for key, (f, offset, t) in elsewhere.items()})
    header: dict[str, Any] = {"__metadata__": metadata}
    in_model: list[tuple[TensorLocation, StateShard, int]] = []
    position = written = 0
    for shard in ordered:
        location = locations.get(shard_key(shard.name, shard.kind))
        if location is not None and len(shard.slice):
            in_model.append((location, shard, position))
        if only_in_model(shard):
            position += shard.tensor.nbytes
            continue
        if shard.tensor.dtype not in TYPES:
            raise ValueError(f"{shard.name} ({shard.kind}) is {shard.tensor.dtype}, which safetensors cannot hold")
        size = shard.tensor.nbytes
        header[shard_key(shard.name, shard.kind)] = {
            "dtype": TYPES[shard.tensor.dtype],
            "shape": [shard.tensor.numel()],
            "data_offsets": [position, position + size],
        }
        position += size
        written = position
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    in_model.sort(key=lambda entry: (entry[0].file, entry[0].offset, entry[1].slice.start))
    return ShardFilePlan(len(text).to_bytes(8, "little") + text, ordered, written, position, in_model)


def write_shard_file(
    stream: BinaryIO,
    shards: Sequence[StateShard],
    scalars: Mapping[str, Mapping[str, Any]],
    locate: LocateInModel = not_in_model,
) -> None:
    """Write a shard file to ``stream``, a few megabytes at a time.

    Args:
        stream: open for writing; receives the whole file.
        shards: tensors on any device; those on an accelerator are copied one at a time.
        scalars: single-value states of parameters.
        locate: tells where the model's files hold the elements of a shard; those of the same type are not written here.

    Raises:
        ValueError: a tensor has a type that safetensors cannot hold.
    """
    plan = plan_shard_file(shards, scalars, locate)
    stream.write(plan.header)
    remaining = plan.written
    for shard in plan.shards:
        if remaining:
            write_bytes(stream, shard.tensor)
            remaining -= shard.tensor.nbytes


def write_bytes(stream: BinaryIO, tensor: torch.Tensor) -> None:
    """Write the elements of ``tensor``, in chunks."""
    flat = tensor.detach().reshape(-1).cpu().view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        stream.write(flat[start : start + _CHUNK].numpy().data)


def _scalar_to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": TYPES[value.dtype], "value": value.item()}
    return {"value": value}


def _scalar_from_json(value: Mapping[str, Any]) -> Any:
    if "dtype" in value:
        return torch.tensor(value["value"], dtype=type_of(value["dtype"]))
    return value["value"]


class ShardFile:
    """The shards in one file, read on demand.

    A shard is memory-mapped only while its tensor is in use, because the pages of a mapped file count as memory of the
    process.

    Attributes:
        slices: the slice of each shard, by key.
        kinds: the kinds of state of each tensor, with the types of their elements.
        scalars: the single-value optimizer states of each parameter.
        in_model: the locations of the shards that only the model's files hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            self._entries = parse_json(stream.read(length))
        self._start = 8 + length
        metadata = self._entries.pop("__metadata__")
        self.slices = {key: ShardSlice.from_json(value) for key, value in parse_json(metadata[_SLICES]).items()}
        self.scalars: dict[str, dict[str, Any]] = {
            name: {key: _scalar_from_json(value) for key, value in of.items()}
            for name, of in parse_json(metadata["scalars"]).items()
        }
        self.in_model: dict[str, TensorLocation] = {
            key: TensorLocation(name, offset, type_of(dtype))
            for key, (name, offset, dtype) in parse_json(metadata.get("in_model", "{}")).items()
        }
        self.kinds: dict[str, dict[str, torch.dtype]] = {}
        for key in self.slices:
            name, _, kind = key.rpartition("/")
            self.kinds.setdefault(name, {})[kind] = self.dtype(key)

    def tensor(self, key: str) -> torch.Tensor:
        """Returns the elements of a shard, flat. The disk is read as the elements are used; changes stay in memory.

        A shard in the model's files is copied if elements of other ranks lie between its own.
        """
        if key in self.in_model:
            return _read_from_model(self.path.parent, self.in_model[key], self.slices[key])
        first, last = self._entries[key]["data_offsets"]
        if first == last:
            return torch.empty(0, dtype=self.dtype(key))
        mapped = np.memmap(self.path, np.uint8, mode="c", offset=self._start + first, shape=(last - first,))
        return torch.from_numpy(mapped).view(self.dtype(key))

    def dtype(self, key: str) -> torch.dtype:
        """Returns the type of a shard's elements."""
        return self.in_model[key].dtype if key in self.in_model else type_of(self._entries[key]["dtype"])


def _read_from_model(directory: Path, location: TensorLocation, wanted: ShardSlice) -> torch.Tensor:
    """Elements of a whole tensor in a file of the model; memory-mapped if they are contiguous there."""
    whole, size = ShardSlice.whole(wanted.shape), location.dtype.itemsize
    first = last = 0
    rectangles = [in_whole for _, in_whole in wanted.common(whole)]
    if rectangles:
        first = min(one.offset for one in rectangles)
        last = max(one.offset + (one.rows - 1) * one.stride + one.columns for one in rectangles)
    if first == last:
        return torch.empty(0, dtype=location.dtype)
    offset = location.offset + first * size
    span = np.memmap(directory / location.file, np.uint8, mode="c", offset=offset, shape=((last - first) * size,))
    mapped = torch.from_numpy(span).view(location.dtype)
    if len(rectangles) == 1 and (rectangles[0].rows == 1 or rectangles[0].columns == rectangles[0].stride):
        return mapped
    elements = torch.empty(len(wanted), dtype=location.dtype)
    copy_common(elements, wanted, mapped, whole.run(first, last))
    return elements

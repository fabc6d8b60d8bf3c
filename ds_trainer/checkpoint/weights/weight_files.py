"""Files of weights for other programs: the safetensors format, written tensor by tensor and read again.

A file appears under its name only when what lies on the disk is what was to be written: each tensor has had the shape
that the model says, the bytes read back have the checksum of those written, and the header lists every tensor.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import torch

from ds_trainer.checkpoint.pieces.element_types import TYPES
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CHUNK = 16 * 2**20  # bytes written or read at a time


class Weight(NamedTuple):
    """A tensor that is to be written: what it must be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


class WeightFilesError(ConfigError):
    """What was to be written is not the model, or what was written is not what it should be."""


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


_S = TypeVar("_S", bound=_Sized)


def plan_files(weights: Sequence[_S], max_bytes: int) -> list[list[_S]]:
    """Weights, or sections, grouped in order so that a file has at most ``max_bytes`` (a larger one stands alone).

    In a file wide types come first: then every tensor is aligned to its own type.
    """
    files: list[list[_S]] = []
    room = 0
    for weight in weights:
        if not files or weight.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(weight)
        room -= weight.nbytes
    return [sorted(file, key=lambda weight: -weight.dtype.itemsize) for file in files or [[]]]


def write_weight_files(
    directory: Path, files: Sequence[Sequence[Weight]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write files of weights, with an index where there are several, and remove those of an earlier save.

    Args:
        directory: made if missing.
        files: what :func:`plan_files` gave.
        tensors: the weights in the order of ``files``, whole, on any device; each is asked for when it is its turn.

    Raises:
        WeightFilesError: a tensor is another one than ``files`` says, or a file reads back otherwise than it was
            written.
        OSError: the disk is full, say; no partial file stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names, arriving = file_names(len(files)), iter(tensors)
    partials = [directory / f".{name}.partial" for name in names]
    try:
        for partial, weights in zip(partials, files, strict=True):
            _read_again(partial, weights, _write(partial, weights, arriving))
        for partial, name in zip(partials, names, strict=True):  # no file of an earlier save was touched before
            partial.replace(directory / name)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    if len(names) > 1:
        write_json(directory / INDEX_FILE, index_of(names, files))
    else:
        (directory / INDEX_FILE).unlink(missing_ok=True)
    for stale in {path for path in directory.glob("model*.safetensors")} - {directory / name for name in names}:
        stale.unlink()


def index_of(names: Sequence[str], files: Sequence[Sequence[Weight]]) -> dict[str, Any]:
    """What the index of ``files``, which are called ``names``, says."""
    where = {weight.name: name for name, weights in zip(names, files, strict=True) for weight in weights}
    total = sum(weight.nbytes for weights in files for weight in weights)
    return {"metadata": {"total_size": total}, "weight_map": where}


def file_names(count: int) -> list[str]:
    """What ``count`` files of one model are called."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def header(weights: Sequence[Weight]) -> bytes:
    """The first bytes of a file: where in it each tensor lies, one after the other from here on."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in weights:
        if weight.dtype not in TYPES:
            raise WeightFilesError(f"{weight.name} is {weight.dtype}, which safetensors cannot hold.")
        entries[weight.name] = {
            "dtype": TYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, position + weight.nbytes],
        }
        position += weight.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, weights: Sequence[Weight], tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Write one file to the disk; the checksum of its bytes."""
    with path.open("wb") as stream:
        head = header(weights)
        stream.write(head)
        checksum = zlib.crc32(head)
        for weight in weights:
            # Handed on at once: whoever keeps a tensor while the next one is gathered has two in memory.
            checksum = _write_tensor(stream, weight, *next(tensors), checksum)
        stream.flush()
        os.fsync(stream.fileno())
    return checksum


def _write_tensor(stream: BinaryIO, weight: Weight, name: str, tensor: torch.Tensor, checksum: int) -> int:
    if (name, tuple(tensor.shape), tensor.dtype) != weight:
        raise WeightFilesError(
            f"{weight.name} should be {list(weight.shape)} of {weight.dtype}, but what arrived is {name}, "
            f"{list(tensor.shape)} of {tensor.dtype}. Nothing of an earlier save was replaced."
        )
    for chunk in bytes_of(tensor):
        stream.write(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements of ``tensor``, some megabytes at a time, from any device."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK].cpu().numpy().data


def _read_again(path: Path, weights: Sequence[Weight], checksum: int) -> None:
    with path.open("rb") as stream:
        if hasattr(os, "posix_fadvise"):  # from the disk, not from memory
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = 0
        while chunk := stream.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    if found != checksum:
        raise WeightFilesError(f"{path} reads back otherwise than it was written: the disk or its driver is broken.")
    listed = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in read_header(path).items()}
    if listed != {weight.name: (weight.shape, TYPES[weight.dtype]) for weight in weights}:
        raise WeightFilesError(f"{path} does not list the tensors that were written to it.")


def read_header(path: Path) -> dict[str, Any]:
    """Every tensor of a safetensors file: ``{name: {"dtype", "shape", "data_offsets"}}``, checked against its size.

    Offsets are counted from the beginning of the file.

    Raises:
        WeightFilesError: it is no such file, or it is shorter or longer than its header says.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """:func:`read_header`, and the metadata of the file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        entries, begin = _parse(stream, size, path)
    metadata = entries.pop("__metadata__", {})
    end = begin
    for name, entry in entries.items():
        try:
            entry["data_offsets"] = [begin + offset for offset in entry["data_offsets"]]
            end = max(end, entry["data_offsets"][1])
            entry["shape"], entry["dtype"]  # both are there
        except (KeyError, IndexError, TypeError):
            raise WeightFilesError(f"{path} is damaged: its header does not say where {name} is.") from None
    if end != size:
        raise WeightFilesError(f"{path} has {size} bytes, and its header says {end}: it was cut off, or is damaged.")
    return entries, metadata


def _parse(stream: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    try:
        if not 2 <= length <= size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        entries = json.loads(stream.read(length))
        if not isinstance(entries, dict):
            raise ValueError("its header is no object")
    except ValueError as error:
        raise WeightFilesError(f"{path} is no safetensors file, or is damaged: {error}.") from None
    return entries, 8 + length

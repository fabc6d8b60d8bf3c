"""Writes safetensors files tensor by tensor, and verifies them by reading them back.

A file gets its final name only after verification: each tensor had the expected shape, the bytes read back have the
checksum of the bytes written, and the header lists every tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import torch

from ds_trainer.checkpoint.shards.element_types import TYPES
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import flush, parse_json, write_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # what a save writes, and the next one replaces
_CHUNK = 16 * 2**20  # bytes per read or write


class WeightSpec(NamedTuple):
    """Name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


class WeightFilesError(ConfigError):
    """The tensors to write are not those of the model, or a written file is not valid."""


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


_S = TypeVar("_S", bound=_Sized)


def plan_files(weights: Sequence[_S], max_bytes: int) -> list[list[_S]]:
    """Groups weights or sections, in order, into files of at most ``max_bytes``; a larger one gets its own file.

    Within a file, wider dtypes come first, so that every tensor is aligned to its dtype.
    """
    files: list[list[_S]] = []
    space = 0
    for weight in weights:
        if not files or weight.nbytes > space:
            files.append([])
            space = max_bytes
        files[-1].append(weight)
        space -= weight.nbytes
    return [sorted(file, key=lambda weight: -weight.dtype.itemsize) for file in files or [[]]]


def write_weight_files(
    directory: Path, files: Sequence[Sequence[WeightSpec]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write weight files, with an index if there are several, and remove the files of a previous save.

    Args:
        directory: created if missing.
        files: the result of :func:`plan_files`.
        tensors: names and full tensors in the order of ``files``, on any device; each is requested when it is needed.

    Raises:
        WeightFilesError: a tensor does not match ``files``, or a file reads back differently than it was written.
        OSError: for example, the disk is full; no partial file remains.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names, remaining = file_names(len(files)), iter(tensors)
    partials = [directory / f".{name}.partial" for name in names]
    try:
        for partial, weights in zip(partials, files, strict=True):
            # Write one file to disk and return the checksum of its bytes.
            with partial.open("wb") as stream:
                header_bytes = header(weights)
                stream.write(header_bytes)
                checksum = zlib.crc32(header_bytes)
                for weight in weights:
                    # No local reference: it would keep this tensor in memory while the next one is gathered.
                    checksum = _write_tensor(stream, weight, *next(remaining), checksum)
                stream.flush()
                flush(stream.fileno())
            _verify_file(partial, weights, checksum)
        for partial, name in zip(partials, names, strict=True):  # until here, files of a previous save are untouched
            partial.replace(directory / name)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    if len(names) > 1:
        write_json(directory / INDEX_FILE, index_of(names, files))
    else:
        (directory / INDEX_FILE).unlink(missing_ok=True)
    for stale in list(directory.glob("model*.safetensors")):
        if WEIGHTS.fullmatch(stale.name) and stale.name not in names:
            stale.unlink()


def index_of(names: Sequence[str], files: Sequence[Sequence[WeightSpec]]) -> dict[str, Any]:
    """Returns the content of the index of ``files`` with the file names ``names``."""
    weight_map = {weight.name: name for name, weights in zip(names, files, strict=True) for weight in weights}
    total = sum(weight.nbytes for weights in files for weight in weights)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def file_names(count: int) -> list[str]:
    """Returns the names of ``count`` weight files of one model."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def header(weights: Sequence[WeightSpec]) -> bytes:
    """Returns the header of a safetensors file in which the tensors follow each other in order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in weights:
        if weight.dtype not in TYPES:
            raise WeightFilesError(f"{weight.name} has dtype {weight.dtype}, which safetensors does not support.")
        entries[weight.name] = {
            "dtype": TYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, position + weight.nbytes],
        }
        position += weight.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, weight: WeightSpec, name: str, tensor: torch.Tensor, checksum: int) -> int:
    if (name, tuple(tensor.shape), tensor.dtype) != weight:
        raise WeightFilesError(
            f"Expected {weight.name}, {list(weight.shape)} of {weight.dtype}, but got {name}, {list(tensor.shape)} of "
            f"{tensor.dtype}. The files of the previous save are unchanged."
        )
    for chunk in bytes_of(tensor):
        stream.write(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of ``tensor``, from any device, in chunks of a few megabytes."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK].cpu().numpy().data


def _verify_file(path: Path, weights: Sequence[WeightSpec], checksum: int) -> None:
    with path.open("rb") as stream:
        if hasattr(os, "posix_fadvise"):  # read from disk, not from the page cache
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = 0
        while chunk := stream.read(_CHUNK):
            written = zlib.crc32(chunk, written)
    if written != checksum:
        raise WeightFilesError(f"{path} reads back differently than it was written: the disk or its driver is faulty.")
    listed = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in read_header(path).items()}
    if listed != {weight.name: (weight.shape, TYPES[weight.dtype]) for weight in weights}:
        raise WeightFilesError(f"{path} does not list the tensors that were written to it.")


def read_header(path: Path) -> dict[str, Any]:
    """Reads the header of a safetensors file: ``{name: {"dtype", "shape", "data_offsets"}}``.

    Offsets count from the beginning of the file. The file size is checked against the header.

    Raises:
        WeightFilesError: it is not a safetensors file, or its size contradicts its header.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Like :func:`read_header`; also returns the metadata of the file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        entries, begin = _parse(stream, size, path)
    metadata = entries.pop("__metadata__", {})
    end = begin
    for name, entry in entries.items():
        try:
            entry["data_offsets"] = [begin + offset for offset in entry["data_offsets"]]
            end = max(end, entry["data_offsets"][1])
            entry["shape"], entry["dtype"]  # both must exist
        except (KeyError, IndexError, TypeError):
            raise WeightFilesError(f"{path} is damaged: its header has no location for {name}.") from None
    if end != size:
        raise WeightFilesError(f"{path} has {size} bytes, but its header requires {end}: it is truncated or damaged.")
    return entries, metadata


def _parse(stream: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    try:
        if not 2 <= length <= size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
        entries = parse_json(stream.read(length))
        if not isinstance(entries, dict):
            raise ValueError("its header is not a JSON object")
    except ValueError as error:
        raise WeightFilesError(f"{path} is not a safetensors file, or is damaged: {error}.") from None
    return entries, 8 + length


class Section(NamedTuple):
    """Consecutive elements in a weight file.

    Attributes:
        tensors: the model tensors that provide the elements, in order.
        entries: the entries of the file's header for the same elements, in order.
    """

    tensors: tuple[WeightSpec, ...]
    entries: tuple[WeightSpec, ...]

    @classmethod
    def of(cls, weight: WeightSpec) -> Section:
        """Returns the section of a tensor that is stored as it is in the model."""
        return cls((weight,), (weight,))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(weight.nbytes for weight in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype of the elements."""
        return self.tensors[0].dtype

    def split(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the entries; each is valid until the next one is requested.

        Args:
            tensors: names and full tensors, in the order of :attr:`tensors`; each is requested when it is needed.

        Raises:
            WeightFilesError: the iterator yields an unexpected tensor.
        """
        expected = iter(self.tensors)
        rest: torch.Tensor | None = None
        for entry in self.entries:
            missing, parts = entry.numel, list[torch.Tensor]()
            while missing or not parts:
                if rest is None or not len(rest):
                    rest = None  # never two tensors in memory
                    parts = [part.cpu().clone() for part in parts]
                    rest = _checked(next(expected), *next(tensors)).reshape(-1)
                parts.append(rest[:missing])
                rest, missing = rest[missing:], missing - len(parts[-1])
            yield entry.name, (parts[0] if len(parts) == 1 else torch.cat([p.cpu() for p in parts])).view(entry.shape)


def entries_of(sections: Iterable[Section]) -> list[WeightSpec]:
    """Returns the header entries of a file of ``sections``."""
    return [entry for section in sections for entry in section.entries]


def tensor_names(sections: Iterable[Section]) -> list[str]:
    """Returns the model's names of the tensors in a file, in order."""
    return [weight.name for section in sections for weight in section.tensors]


def _checked(weight: WeightSpec, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if (name, tuple(tensor.shape), tensor.dtype) != weight:
        raise WeightFilesError(
            f"Expected {weight.name}, {list(weight.shape)} of {weight.dtype}, but got {name}, {list(tensor.shape)} of "
            f"{tensor.dtype}. The files of the previous save are unchanged."
        )
    return tensor

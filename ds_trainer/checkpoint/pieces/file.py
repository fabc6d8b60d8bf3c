"""Pieces of tensors in a file: the safetensors format, with the place of each piece in its metadata.

One rank writes one file (and one more for each group of states that DeepSpeed had swapped out). Any reader of
safetensors can open it; which elements of which tensor a piece is stands in the metadata under ``places``. A piece
whose elements are in the model's own weight files bit for bit is not written a second time: ``in_model`` says where the
whole tensor lies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from ds_trainer.checkpoint.pieces.element_types import TYPES as _TYPES
from ds_trainer.checkpoint.pieces.element_types import type_of as _dtype
from ds_trainer.checkpoint.pieces.model_plan import StoredTensor
from ds_trainer.engine.state.pieces import Piece
from ds_trainer.parallel.places import Place, copy_common

_CHUNK = 16 * 2**20  # bytes written at a time


def key_of(name: str, kind: str) -> str:
    """The name of a piece in its file: a rank has one piece of a kind of a tensor."""
    return f"{name}/{kind}"


Stored = Callable[[Piece], StoredTensor | None]
"""Where the elements of a piece lie in the model's own files; None where it is none of the weights."""


def not_stored(piece: Piece) -> None:
    """For a checkpoint without a model."""


class Arranged(NamedTuple):
    """A file of pieces, and what there is beside it.

    Attributes:
        head: its first bytes.
        pieces: what follows without gaps: first those whose elements the file holds, then those that are in the
            model's files only.
        written: bytes of the elements in the file.
        size: bytes of all pieces.
        in_model: which of them go into the model's files: where each lies there, and in memory after ``head``.
    """

    head: bytes
    pieces: list[Piece]
    written: int
    size: int
    in_model: list[tuple[StoredTensor, Piece, int]]


def arrange(pieces: Sequence[Piece], scalars: Mapping[str, Mapping[str, Any]], stored: Stored = not_stored) -> Arranged:
    """What a file of these pieces is made of; ``scalars`` are read now, of the tensors only types and sizes.

    Raises:
        ValueError: a tensor has a type that the format does not know.
    """
    where = {key_of(p.name, p.kind): found for p in pieces if (found := stored(p)) is not None}

    def left_out(piece: Piece) -> bool:
        found = where.get(key_of(piece.name, piece.kind))
        return found is not None and found.dtype == piece.tensor.dtype

    # Wide types first: then every tensor is aligned to its own type.
    ordered = sorted(pieces, key=lambda piece: (left_out(piece), -piece.tensor.element_size()))
    metadata = {
        "format": "pt",
        "places": json.dumps({key_of(p.name, p.kind): p.place.to_json() for p in ordered}),
        "scalars": json.dumps(_scalars_to_json(scalars)),
    }
    elsewhere = {key: where[key] for p in ordered if left_out(p) for key in (key_of(p.name, p.kind),)}
    if elsewhere:
        metadata["in_model"] = json.dumps({key: [f, offset, _TYPES[t]] for key, (f, offset, t) in elsewhere.items()})
    header: dict[str, Any] = {"__metadata__": metadata}
    in_model: list[tuple[StoredTensor, Piece, int]] = []
    position = written = 0
    for piece in ordered:
        found = where.get(key_of(piece.name, piece.kind))
        if found is not None and len(piece.place):
            in_model.append((found, piece, position))
        if left_out(piece):
            position += piece.tensor.nbytes
            continue
        if piece.tensor.dtype not in _TYPES:
            raise ValueError(f"{piece.name} ({piece.kind}) is {piece.tensor.dtype}, which safetensors cannot hold")
        size = piece.tensor.nbytes
        header[key_of(piece.name, piece.kind)] = {
            "dtype": _TYPES[piece.tensor.dtype],
            "shape": [piece.tensor.numel()],
            "data_offsets": [position, position + size],
        }
        position += size
        written = position
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    in_model.sort(key=lambda one: (one[0].file, one[0].offset, one[1].place.start))
    return Arranged(len(text).to_bytes(8, "little") + text, ordered, written, position, in_model)


def write_pieces_file(
    stream: BinaryIO,
    pieces: Sequence[Piece],
    scalars: Mapping[str, Mapping[str, Any]],
    stored: Stored = not_stored,
) -> None:
    """Write pieces to ``stream``, a few megabytes at a time.

    Args:
        stream: open for writing; what is written to it is all of the file.
        pieces: tensors on any device; those on a device are copied one at a time.
        scalars: the one-number states of parameters.
        stored: of which pieces the model's files hold the elements; those of the same type are not written here.

    Raises:
        ValueError: a tensor has a type that the format does not know.
    """
    arranged = arrange(pieces, scalars, stored)
    stream.write(arranged.head)
    rest = arranged.written
    for piece in arranged.pieces:
        if rest:
            write_bytes(stream, piece.tensor)
            rest -= piece.tensor.nbytes


def write_bytes(stream: BinaryIO, tensor: torch.Tensor) -> None:
    """Write the elements of ``tensor``, in chunks."""
    flat = tensor.detach().reshape(-1).cpu().view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        stream.write(flat[start : start + _CHUNK].numpy().data)


def _scalars_to_json(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: _scalar_to_json(value) for key, value in of.items()} for name, of in scalars.items()}


def _scalar_to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": _TYPES[value.dtype], "value": value.item()}
    return {"value": value}


def _scalar_from_json(value: Mapping[str, Any]) -> Any:
    if "dtype" in value:
        return torch.tensor(value["value"], dtype=_dtype(value["dtype"]))
    return value["value"]


class PiecesFile:
    """The pieces in one file, read where they are asked for.

    One piece at a time is mapped into memory, and only for as long as somebody has it: pages of a file that stays
    mapped count as memory of the process.

    Attributes:
        places: of the pieces, by key.
        kinds: what there is of each tensor, with the type of its elements.
        scalars: of each parameter's optimizer state what is one number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            self._entries = json.loads(stream.read(length))
        self._start = 8 + length
        metadata = self._entries.pop("__metadata__")
        self.places = {key: Place.from_json(value) for key, value in json.loads(metadata["places"]).items()}
        self.scalars: dict[str, dict[str, Any]] = {
            name: {key: _scalar_from_json(value) for key, value in of.items()}
            for name, of in json.loads(metadata["scalars"]).items()
        }
        self.in_model: dict[str, StoredTensor] = {
            key: StoredTensor(name, offset, _dtype(dtype))
            for key, (name, offset, dtype) in json.loads(metadata.get("in_model", "{}")).items()
        }
        self.kinds: dict[str, dict[str, torch.dtype]] = {}
        for key in self.places:
            name, _, kind = key.rpartition("/")
            self.kinds.setdefault(name, {})[kind] = self.dtype(key)

    def tensor(self, key: str) -> torch.Tensor:
        """The elements of a piece, flat; only what is read of it is read from the disk. Changes stay in memory.

        Of a piece in the model's files, of which other ranks hold elements in between, there is a copy.
        """
        if key in self.in_model:
            return _of_model(self.path.parent, self.in_model[key], self.places[key])
        first, last = self._entries[key]["data_offsets"]
        if first == last:
            return torch.empty(0, dtype=self.dtype(key))
        mapped = np.memmap(self.path, np.uint8, mode="c", offset=self._start + first, shape=(last - first,))
        return torch.from_numpy(mapped).view(self.dtype(key))

    def dtype(self, key: str) -> torch.dtype:
        """Type of the elements of a piece."""
        return self.in_model[key].dtype if key in self.in_model else _dtype(self._entries[key]["dtype"])


def _of_model(directory: Path, stored: StoredTensor, place: Place) -> torch.Tensor:
    """Elements of a whole tensor in a file of the model; mapped where they follow each other."""
    whole, size = Place.whole(place.shape), stored.dtype.itemsize
    first = last = 0
    found = [there for _, there in place.common(whole)]
    if found:
        first = min(one.offset for one in found)
        last = max(one.offset + (one.rows - 1) * one.stride + one.columns for one in found)
    if first == last:
        return torch.empty(0, dtype=stored.dtype)
    span = np.memmap(
        directory / stored.file, np.uint8, mode="c", offset=stored.offset + first * size, shape=((last - first) * size,)
    )
    mapped = torch.from_numpy(span).view(stored.dtype)
    if len(found) == 1 and (found[0].rows == 1 or found[0].columns == found[0].stride):
        return mapped
    elements = torch.empty(len(place), dtype=stored.dtype)
    copy_common(elements, place, mapped, whole.run(first, last))
    return elements

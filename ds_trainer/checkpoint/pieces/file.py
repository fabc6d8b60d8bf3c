"""Pieces of tensors in a file: the safetensors format, with the place of each piece in its metadata.

One rank writes one file (and one more for each group of states that DeepSpeed had swapped out). Any reader of
safetensors can open it; which elements of which tensor a piece is stands in the metadata under ``places``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from ds_trainer.checkpoint.pieces.element_types import TYPES as _TYPES
from ds_trainer.checkpoint.pieces.element_types import type_of as _dtype
from ds_trainer.engine.state.pieces import Piece
from ds_trainer.parallel.places import Place

_CHUNK = 16 * 2**20  # bytes written at a time


def key_of(name: str, kind: str) -> str:
    """The name of a piece in its file: a rank has one piece of a kind of a tensor."""
    return f"{name}/{kind}"


class Arranged(NamedTuple):
    """A file of pieces: its first bytes, then the elements of ``pieces`` in this order without gaps, ``size`` bytes."""

    head: bytes
    pieces: list[Piece]
    size: int


def arrange(pieces: Sequence[Piece], scalars: Mapping[str, Mapping[str, Any]]) -> Arranged:
    """What a file of these pieces is made of; ``scalars`` are read now, of the tensors only types and sizes.

    Raises:
        ValueError: a tensor has a type that the format does not know.
    """
    # Wide types first: then every tensor is aligned to its own type.
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "places": json.dumps({key_of(p.name, p.kind): p.place.to_json() for p in ordered}),
            "scalars": json.dumps(_scalars_to_json(scalars)),
        }
    }
    position = 0
    for piece in ordered:
        if piece.tensor.dtype not in _TYPES:
            raise ValueError(f"{piece.name} ({piece.kind}) is {piece.tensor.dtype}, which safetensors cannot hold")
        size = piece.tensor.nbytes
        header[key_of(piece.name, piece.kind)] = {
            "dtype": _TYPES[piece.tensor.dtype],
            "shape": [piece.tensor.numel()],
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Arranged(len(text).to_bytes(8, "little") + text, ordered, position)


def write_pieces_file(stream: BinaryIO, pieces: Sequence[Piece], scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """Write pieces to ``stream``, a few megabytes at a time.

    Args:
        stream: open for writing; what is written to it is all of the file.
        pieces: tensors on any device; those on a device are copied one at a time.
        scalars: the one-number states of parameters.

    Raises:
        ValueError: a tensor has a type that the format does not know.
    """
    arranged = arrange(pieces, scalars)
    stream.write(arranged.head)
    for piece in arranged.pieces:
        write_bytes(stream, piece.tensor)


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
        self.kinds: dict[str, dict[str, torch.dtype]] = {}
        for key in self.places:
            name, _, kind = key.rpartition("/")
            self.kinds.setdefault(name, {})[kind] = self.dtype(key)

    def tensor(self, key: str) -> torch.Tensor:
        """The elements of a piece, flat; only what is read of it is read from the disk. Changes stay in memory."""
        first, last = self._entries[key]["data_offsets"]
        if first == last:
            return torch.empty(0, dtype=self.dtype(key))
        mapped = np.memmap(self.path, np.uint8, mode="c", offset=self._start + first, shape=(last - first,))
        return torch.from_numpy(mapped).view(self.dtype(key))

    def dtype(self, key: str) -> torch.dtype:
        """Type of the elements of a piece."""
        return _dtype(self._entries[key]["dtype"])

"""Whole tensors out of the pieces of a checkpoint, one at a time: no process group, no model, no GPU.

Files are read by ordinary reads of a few megabytes, not mapped, so that what is resident is one tensor and a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.export.base_weights import BaseWeights
from ds_trainer.checkpoint.pieces.element_types import type_of
from ds_trainer.checkpoint.pieces.file import key_of
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.description import DescribedTensor
from ds_trainer.checkpoint.weights.weight_files import read_header_and_metadata
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils.errors import ConfigError

_CHUNK = 32 * 2**20  # bytes of a piece that are read at a time


class _StoredPiece(NamedTuple):
    path: Path
    place: Place
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the file


class CheckpointWeights:
    """The weights in a checkpoint.

    Args:
        checkpoint: its directory.
        base: of adapters: the directory of the model that they belong to; default: where that was loaded from.

    Raises:
        ConfigError: it has no files of pieces, or a damaged one.
    """

    def __init__(self, checkpoint: Path, base: Path | None = None) -> None:
        self.checkpoint = checkpoint
        digest = BaseDigest.read(checkpoint)
        self._base = None if digest is None else BaseWeights(checkpoint, digest, base)
        self._pieces: dict[str, list[_StoredPiece]] = {}
        paths = sorted(checkpoint.glob("rank_*.safetensors"))
        if not paths:
            raise ConfigError(
                f"{checkpoint} holds no weights in pieces (no rank_*.safetensors in it). Give the path of a "
                "checkpoint-N directory that training has written."
            )
        for path in paths:
            header, metadata = read_header_and_metadata(path)
            in_model = json.loads(metadata.get("in_model", "{}"))
            for key, listed in json.loads(metadata["places"]).items():
                place = Place.from_json(listed)
                if key in in_model:  # and all other ranks' parts of it: the whole tensor lies there
                    name, offset, dtype = in_model[key]
                    whole = Place.whole(place.shape)
                    self._pieces[key] = [_StoredPiece(checkpoint / name, whole, type_of(dtype), offset)]
                    continue
                entry = header[key]
                stored = _StoredPiece(path, place, type_of(entry["dtype"]), entry["data_offsets"][0])
                self._pieces.setdefault(key, []).append(stored)

    def kinds(self) -> dict[str, int]:
        """Bytes of each kind of piece: weights, masters, states of the optimizer."""
        found: dict[str, int] = {}
        for key, pieces in sorted(self._pieces.items()):
            kind = key.rpartition("/")[2]
            found[kind] = found.get(kind, 0) + sum(len(piece.place) * piece.dtype.itemsize for piece in pieces)
        return found

    def incomplete(self, tensors: Sequence[DescribedTensor]) -> list[str]:
        """What is wrong with the pieces of ``tensors``, one sentence each; nothing is read of them."""
        problems = []
        for tensor in tensors:
            if tensor.kept_as is None:
                problems.append(f"{tensor.name} is made by the model whenever it is saved; checkpoints do not hold it.")
                continue
            if self._of_base(tensor):
                continue  # compared when it is read
            wanted = tensor.weight()
            numel = wanted.nbytes // wanted.dtype.itemsize
            stored = self._stored(tensor)
            held = (
                max((len(p.place) for p in stored), default=0) if tensor.buffer else sum(len(p.place) for p in stored)
            )
            shapes = {p.place.shape for p in stored}
            if held != numel:
                problems.append(f"{tensor.name}: {held} of {numel} elements are in {self.checkpoint}.")
            elif any(_numel(shape) != numel for shape in shapes):
                problems.append(f"{tensor.name} is {list(tensor.shape)}, but its pieces are of {sorted(shapes)}.")
        return problems

    def read(self, tensor: DescribedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor, in the shape and of the type that are asked for.

        Raises:
            ConfigError: some of it is in none of the files.
        """
        if self._base is not None and tensor.kept_as is not None and self._of_base(tensor):
            return self._base.read(tensor.kept_as, dtype)
        stored = self._stored(tensor)
        numel = _numel(tensor.shape)
        target = torch.empty(numel, dtype=dtype)
        copied = 0
        for piece in stored[:1] if tensor.buffer else stored:
            whole = Place.whole(piece.place.shape)
            for place, elements in _chunks(piece):
                copied += copy_common(target, whole, elements, place)
        if copied != numel:
            raise ConfigError(
                f"{self.checkpoint}: {numel - copied} of {numel} elements of {tensor.name} are in none of its files. A "
                "file of a rank is missing; with save_on_each_node=True the directories of all nodes are needed."
            )
        return target.view(tensor.shape)

    def _of_base(self, tensor: DescribedTensor) -> bool:
        return bool(self._base and tensor.kept_as and self._base.has(tensor.kept_as) and not self._stored(tensor))

    def _stored(self, tensor: DescribedTensor) -> list[_StoredPiece]:
        if tensor.kept_as is None:
            return []
        kinds = (BUFFER,) if tensor.buffer else (MASTER, WEIGHT)
        return next((found for kind in kinds if (found := self._pieces.get(key_of(tensor.kept_as, kind)))), [])


def _numel(shape: Sequence[int]) -> int:
    return len(Place.whole(shape))


def _chunks(piece: _StoredPiece) -> Iterator[tuple[Place, torch.Tensor]]:
    """The elements of a piece, a part at a time, with where each part lies."""
    size = piece.dtype.itemsize
    step = max(1, _CHUNK // size)
    with piece.path.open("rb", buffering=0) as stream:
        stream.seek(piece.offset)
        for start in range(0, len(piece.place), step):
            stop = min(start + step, len(piece.place))
            elements = torch.empty(stop - start, dtype=piece.dtype)
            rest = elements.view(torch.uint8).numpy().data
            while rest:
                read = stream.readinto(rest)
                if not read:
                    raise OSError(f"{piece.path} ends too early: it was cut off while it was read.")
                rest = rest[read:]
            yield piece.place.run(piece.place.start + start, piece.place.start + stop), elements

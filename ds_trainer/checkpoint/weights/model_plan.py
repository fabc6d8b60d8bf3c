"""The model in a checkpoint: which safetensors files there are, and where in them each tensor lies.

All ranks plan alike, from the model alone: names, shapes and types. So each writes its own elements in place, out of
the same copy of the state that its pieces are written from; nothing is gathered.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ds_trainer.checkpoint.pieces.element_types import TYPES
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, Weight, file_names, header, index_of, plan_files
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Piece, persistent_buffers
from ds_trainer.engine.weights import full_shape, saved_tensors


class NoModelFiles(ValueError):
    """The weights of a model do not follow from its pieces."""


class StoredTensor(NamedTuple):
    """Where a whole tensor lies: ``offset`` bytes from the beginning of ``file``."""

    file: str
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelPlan:
    """The weight files of one model.

    Attributes:
        files: with their headers.
        index: what ``from_pretrained`` reads first; None where there is one file.
        tensors: by the name of their pieces.
        max_bytes: largest size of one file.
    """

    files: Sequence[SharedFile]
    index: Held | None
    tensors: dict[str, StoredTensor]
    max_bytes: int

    def stored(self, piece: Piece, speaks: bool) -> StoredTensor | None:
        """Where the elements of ``piece`` lie in the model; None where this rank does not write them there.

        Args:
            piece: any of the engine's.
            speaks: this rank writes the buffers, of which every rank has its own.
        """
        kinds: Collection[str] = (MASTER, WEIGHT, BUFFER) if speaks else (MASTER, WEIGHT)
        return self.tensors.get(piece.name) if piece.kind in kinds else None


def plan_model(model: nn.Module, max_bytes: int) -> ModelPlan:
    """Plan the files of ``model``, of which this rank may hold a part only.

    Args:
        model: the module, whole or sharded; not the engine around it.
        max_bytes: largest size of one file; a single tensor may exceed it.

    Raises:
        NoModelFiles: a tensor that ``save_model`` writes is neither a parameter nor a buffer of the model, or has a
            type that safetensors cannot hold.
    """
    kept = {id(buffer): name for name, buffer in reversed(list(persistent_buffers(model)))}
    kept.update({id(parameter): name for name, parameter in model.named_parameters()})
    tensors = saved_tensors(model)
    problems = [name for name, tensor in tensors.items() if id(tensor) not in kept or tensor.dtype not in TYPES]
    if problems:
        raise NoModelFiles(
            f"{', '.join(problems[:3])}{' ...' if len(problems) > 3 else ''}: no parameter or buffer of a type that "
            "safetensors can hold"
        )
    files = plan_files([Weight(n, full_shape(t), t.dtype) for n, t in tensors.items()], max_bytes)
    names = file_names(len(files))
    shared, stored = [], {}
    for name, weights in zip(names, files, strict=True):
        head = header(weights)
        offset = len(head)
        for weight in weights:
            stored[kept[id(tensors[weight.name])]] = StoredTensor(name, offset, weight.dtype)
            offset += weight.nbytes
        shared.append(SharedFile(name, offset, head))
    text = json.dumps(index_of(names, files), indent=2, ensure_ascii=False) + "\n" if len(names) > 1 else None
    return ModelPlan(shared, None if text is None else Held(INDEX_FILE, text.encode()), stored, max_bytes)

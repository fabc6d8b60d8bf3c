"""Weights alone, put into an engine of any layout: from a checkpoint of ours, or from safetensors of anybody."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.checkpoint.pieces.source import OnlyWeights, shared_source
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE
from ds_trainer.engine.state.pieces import BUFFER, WEIGHT, Source, persistent_buffers, write_pieces
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError

_PIECES = "rank_*.safetensors"


class _OfFiles:
    """Weight files as a source without states (:class:`ds_trainer.engine.state.pieces.Source`).

    Args:
        weights: the files.
        buffers: names that are buffers.
    """

    def __init__(self, weights: FileWeights, buffers: Collection[str]) -> None:
        self._weights = weights
        self._buffers = buffers

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        if not self._weights.has(name):
            return {}
        return {BUFFER if name in self._buffers else WEIGHT: torch.float32}

    def fill(self, name: str, kind: str, place: Place, target: torch.Tensor) -> None:
        self._weights.fill(name, place, target)

    def scalars(self, name: str) -> dict[str, Any]:
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        return {}


def holds_pieces(directory: Path) -> bool:
    """Whether it is a checkpoint of ours: then its pieces count, whatever else is there."""
    return next(directory.glob(_PIECES), None) is not None


def read_weights(engine: TrainingEngine, directory: Path) -> None:
    """Give ``engine`` the weights in ``directory``, and nothing else of it. Collective.

    Args:
        engine: of any layout and ZeRO stage.
        directory: a checkpoint of ours in whatever layout, or a directory with ``model.safetensors``.

    Raises:
        ConfigError: it is neither, or holds another model.
    """
    pieces = sorted(directory.glob(_PIECES))
    left_out: Collection[str] = ()
    files: FileWeights | None = None
    if pieces:
        source: Source = OnlyWeights(shared_source(directory, [path.name for path in pieces]))
        base = BaseDigest.read(directory)
        if base is not None:
            base.check(BaseDigest.of(engine), directory)
            left_out = base.tensors
    elif (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
        model: Any = engine.deepspeed.module
        # A copy: what it is saved as does not follow from these files.
        files = open_weights(directory, copy.copy(model))
        source = _OfFiles(files, {name for name, _ in persistent_buffers(model)})
    else:
        raise ConfigError(
            f"{directory} holds no weights: neither a checkpoint ({_PIECES}) nor {SINGLE_FILE} or {INDEX_FILE}."
        )
    write_pieces(engine, source, left_out)
    if files is not None:
        files.close()

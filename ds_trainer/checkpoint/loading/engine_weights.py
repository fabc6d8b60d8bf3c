"""Loads only the weights into an engine of any layout, from a ds_trainer checkpoint or from safetensors files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.saved_weights import SavedAdapterWeights, SavedModelWeights
from ds_trainer.checkpoint.shards.shard_source import WeightsOnlySource, open_shard_source
from ds_trainer.checkpoint.weights.adapter_files import WEIGHTS_FILE, saves_adapters
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE
from ds_trainer.engine.state.buffers import Shapes, buffer_shapes, match_buffers
from ds_trainer.engine.state.state_shards import BUFFER, WEIGHT, StateSource, write_state_shards
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

_SHARD_FILES = "rank_*.safetensors"


class _FileSource:
    """Weight files as a state source without optimizer states (:mod:`ds_trainer.engine.state.state_shards`).

    Args:
        weights: the weight files.
        shapes: the shapes of the model's buffers.
    """

    def __init__(self, weights: SavedModelWeights | SavedAdapterWeights, shapes: Shapes) -> None:
        self._weights = weights
        self._shapes = shapes

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        if not self._weights.has(name):
            return {}
        return {BUFFER if name in self._shapes else WEIGHT: torch.float32}

    def fill(self, name: str, kind: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        self._weights.fill(name, shard_slice, target)

    def scalars(self, name: str) -> dict[str, Any]:
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        return {}

    def buffers(self) -> Shapes:
        return {name: shape for name, shape in self._shapes.items() if self._weights.has(name)}


def holds_shards(directory: Path) -> bool:
    """Whether it is a ds_trainer checkpoint, whose shards take precedence over other files in the directory."""
    return next(directory.glob(_SHARD_FILES), None) is not None


def load_engine_weights(engine: TrainingEngine, directory: Path) -> None:
    """Load the weights in ``directory`` into ``engine``, and nothing else. Collective.

    Args:
        engine: an engine of any layout and ZeRO stage.
        directory: a ds_trainer checkpoint of any layout, or a directory with ``model.safetensors`` or its index, or
            with the adapters of the engine's model.

    Raises:
        ConfigError: it is neither, or holds a different model.
    """
    shard_files = sorted(directory.glob(_SHARD_FILES))
    source: StateSource
    left_out: Collection[str] = ()
    files: SavedModelWeights | SavedAdapterWeights | None = None
    model: Any = engine.deepspeed.module
    if shard_files:
        source = WeightsOnlySource(open_shard_source(directory, [path.name for path in shard_files]))
        base = BaseDigest.read(directory)
        if base is not None:
            base.check(BaseDigest.of(engine), directory)
            left_out = base.tensors
    elif (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
        files = SavedModelWeights(directory, model)
        shapes = buffer_shapes(model)
        grown = {name: (shape, shapes[name][1]) for name, shape in files.other_shapes.items() if name in shapes}
        if grown:
            match_buffers(model, {**shapes, **grown})
            files = SavedModelWeights(directory, model)
    elif saves_adapters(model) and next(directory.rglob(WEIGHTS_FILE), None) is not None:
        files = SavedAdapterWeights(directory, model)
        left_out = files.base.tensors
    else:
        raise ConfigError(
            f"{directory} holds no weights: found neither checkpoint shards ({_SHARD_FILES}) nor {SINGLE_FILE} or "
            f"{INDEX_FILE}. Pass a checkpoint or the directory of a saved model."
        )
    if files is not None:
        source = _FileSource(files, buffer_shapes(model))
    write_state_shards(engine, source, left_out)
    if files is not None:
        files.close()

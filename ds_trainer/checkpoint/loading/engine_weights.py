"""Loads only the weights into an engine of any layout, from a ds_trainer checkpoint or from safetensors files."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.checkpoint.shards.shard_source import WeightsOnlySource, open_shard_source
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE
from ds_trainer.engine.state.state_shards import BUFFER, WEIGHT, StateSource, persistent_buffers, write_state_shards
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

_SHARD_FILES = "rank_*.safetensors"


class _FileSource:
    """Weight files as a state source without optimizer states (:mod:`ds_trainer.engine.state.state_shards`).

    Args:
        weights: the weight files.
        buffers: names of the buffers.
    """

    def __init__(self, weights: FileWeights, buffers: Collection[str]) -> None:
        self._weights = weights
        self._buffers = buffers

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        if not self._weights.has(name):
            return {}
        return {BUFFER if name in self._buffers else WEIGHT: torch.float32}

    def fill(self, name: str, kind: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        self._weights.fill(name, shard_slice, target)

    def scalars(self, name: str) -> dict[str, Any]:
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        return {}


def holds_shards(directory: Path) -> bool:
    """Whether it is a ds_trainer checkpoint, whose shards take precedence over other files in the directory."""
    return next(directory.glob(_SHARD_FILES), None) is not None


def load_engine_weights(engine: TrainingEngine, directory: Path) -> None:
    """Load the weights in ``directory`` into ``engine``, and nothing else. Collective.

    Args:
        engine: an engine of any layout and ZeRO stage.
        directory: a ds_trainer checkpoint of any layout, or a directory with ``model.safetensors`` or its index.

    Raises:
        ConfigError: it is neither, or holds a different model.
    """
    shard_files = sorted(directory.glob(_SHARD_FILES))
    left_out: Collection[str] = ()
    files: FileWeights | None = None
    if shard_files:
        source: StateSource = WeightsOnlySource(open_shard_source(directory, [path.name for path in shard_files]))
        base = BaseDigest.read(directory)
        if base is not None:
            base.check(BaseDigest.of(engine), directory)
            left_out = base.tensors
    elif (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
        model: Any = engine.deepspeed.module
        # A copy: these files must not determine the names under which the model is saved.
        files = open_weights(directory, copy.copy(model))
        source = _FileSource(files, {name for name, _ in persistent_buffers(model)})
    else:
        raise ConfigError(
            f"{directory} holds no weights: found neither checkpoint shards ({_SHARD_FILES}) nor {SINGLE_FILE} or "
            f"{INDEX_FILE}. Pass a checkpoint or the directory of a saved model."
        )
    write_state_shards(engine, source, left_out)
    if files is not None:
        files.close()

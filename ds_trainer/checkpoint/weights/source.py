"""Weights alone, put into an engine of any layout: from a checkpoint of ours, or from safetensors of anybody."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.pieces.source import OnlyWeights, shared_source
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE
from ds_trainer.engine.state.pieces import BUFFER, WEIGHT, Source, persistent_buffers, write_pieces
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils.errors import ConfigError

_PIECES = "rank_*.safetensors"


class WholeTensors:
    """Whole tensors in safetensors files, of which one at a time is read.

    Args:
        directory: holds ``model.safetensors``, or several files with their index.
        other_names: for each name of the model, what else the same tensor is called (tied weights are stored once).
        buffers: names that are buffers.
    """

    def __init__(self, directory: Path, other_names: Mapping[str, list[str]], buffers: set[str]) -> None:
        from safetensors import safe_open

        self.directory = directory
        self._other_names = other_names
        self._buffers = buffers
        index = directory / INDEX_FILE
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE_FILE]
        files = [safe_open(str(directory / name), framework="pt") for name in names]
        self._files = {key: file for file in files for key in list(file.keys())}

    def _key(self, name: str) -> str | None:
        return next((key for key in (name, *self._other_names.get(name, ())) if key in self._files), None)

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        return {} if self._key(name) is None else {BUFFER if name in self._buffers else WEIGHT: torch.float32}

    def fill(self, name: str, kind: str, place: Place, target: torch.Tensor) -> None:
        """Read into ``target``; other types are converted.

        Raises:
            ConfigError: there is no such tensor, or it has another shape.
        """
        key = self._key(name)
        if key is None:
            raise ConfigError(f"{self.directory} has no {name}: it holds the weights of another model.")
        whole = self._files[key].get_tensor(key)
        if tuple(whole.shape) != place.shape:
            raise ConfigError(
                f"{name} has the shape {list(place.shape)} here, and {list(whole.shape)} in {self.directory}: it holds "
                "the weights of another model."
            )
        copy_common(target, place, whole.reshape(-1), Place.whole(place.shape))

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
    if pieces:
        source: Source = OnlyWeights(shared_source(directory, [path.name for path in pieces]))
        base = BaseDigest.read(directory)
        if base is not None:
            base.check(BaseDigest.of(engine), directory)
            left_out = base.tensors
    elif (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
        model = engine.deepspeed.module
        source = WholeTensors(directory, _other_names(model), {name for name, _ in persistent_buffers(model)})
    else:
        raise ConfigError(
            f"{directory} holds no weights: neither a checkpoint ({_PIECES}) nor {SINGLE_FILE} or {INDEX_FILE}."
        )
    write_pieces(engine, source, left_out)


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return {name: [other for other in names if other != name] for names in by_tensor.values() for name in names}

"""The model that the adapters of a checkpoint belong to, read from where it was loaded: checkpoints do not hold it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ds_trainer.checkpoint.export.blueprint import base_blueprint
from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.description import ModelDescription
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError

_OF_PEFT = ("base_layer", "original_module")  # where peft keeps what it wraps
_INSIDE = "base_model.model."


class BaseWeights:
    """Whole tensors of the base, one at a time, compared with what the checkpoint says of them.

    Args:
        checkpoint: with adapters, and a digest of their base.
        digest: of the base.
        directory: of the base; default: where it was loaded from.
    """

    def __init__(self, checkpoint: Path, digest: BaseDigest, directory: Path | None) -> None:
        self._checkpoint = checkpoint
        self._digest = digest
        self._directory = directory
        self._weights: FileWeights | None = None

    def has(self, name: str) -> bool:
        """Whether the tensor is one of the base's."""
        return name in self._digest.tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor.

        Raises:
            ConfigError: the base is not there, has no such tensor, or is another one.
        """
        weights = self._opened()
        key = name.removeprefix(_INSIDE)
        key = ".".join(part for part in key.split(".") if part not in _OF_PEFT)
        if not weights.has(key):
            raise ConfigError(f"{self._directory} has no {key}: it is not the model that the adapters belong to.")
        shape = self._digest.shape(name)
        found = torch.empty(math.prod(shape), dtype=self._digest.dtype(name))
        weights.fill(key, Place.whole(shape), found)
        found = found.view(shape)
        self._digest.check_tensor(name, found, Path(str(self._directory)))
        return found.to(dtype)

    def _opened(self) -> FileWeights:
        if self._weights is None:
            model = base_blueprint(self._checkpoint, ModelDescription.read(self._checkpoint))
            self._weights = open_weights(self._found(), model)
        return self._weights

    def _found(self) -> Path:
        if self._directory is None:
            self._directory = _downloaded(self._digest.model)
        if self._directory is None or not any(self._directory.glob("*.safetensors")):
            raise ConfigError(
                f"{self._checkpoint} holds adapters, not the model that they belong to, and that one "
                f"({self._directory or self._digest.model or 'unnamed'}) is not here as safetensors. Name its "
                "directory by --model."
            )
        return self._directory


def _downloaded(name: str) -> Path | None:
    """A directory of this name, or the Hub's files of it."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError):
        return None

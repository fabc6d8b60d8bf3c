"""Reads the base model of a checkpoint's adapters from its original files, as the checkpoint does not contain it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ds_trainer.checkpoint.export.meta_model import base_meta_model
from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.model_description import ModelDescription
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

_PEFT_WRAPPERS = ("base_layer", "original_module")  # peft's attributes for wrapped modules
_PEFT_PREFIX = "base_model.model."


class BaseWeights:
    """Reads full tensors of the base model, one at a time, and checks them against the checkpoint's digest.

    Args:
        checkpoint: a checkpoint with adapters and the digest of their base.
        digest: the digest of the base.
        directory: the directory of the base; default: where it was loaded from.
    """

    def __init__(self, checkpoint: Path, digest: BaseDigest, directory: Path | None) -> None:
        self._checkpoint = checkpoint
        self._digest = digest
        self._directory = directory
        self._weights: FileWeights | None = None

    def has(self, name: str) -> bool:
        """Whether the tensor belongs to the base."""
        return name in self._digest.tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a full tensor.

        Raises:
            ConfigError: the base is not available, lacks the tensor, or is a different model.
        """
        weights = self._opened()
        key = name.removeprefix(_PEFT_PREFIX)
        key = ".".join(part for part in key.split(".") if part not in _PEFT_WRAPPERS)
        if not weights.has(key):
            raise ConfigError(f"{self._directory} has no {key}: it is not the base model of the adapters.")
        shape = self._digest.shape(name)
        flat = torch.empty(math.prod(shape), dtype=self._digest.dtype(name))
        weights.fill(key, ShardSlice.whole(shape), flat)
        tensor = flat.view(shape)
        self._digest.check_tensor(name, tensor, Path(str(self._directory)))
        return tensor.to(dtype)

    def _opened(self) -> FileWeights:
        if self._weights is None:
            model = base_meta_model(self._checkpoint, ModelDescription.read(self._checkpoint))
            self._weights = open_weights(self._find_directory(), model)
        return self._weights

    def _find_directory(self) -> Path:
        if self._directory is None:
            self._directory = _downloaded(self._digest.model)
        if self._directory is None or not any(self._directory.glob("*.safetensors")):
            raise ConfigError(
                f"{self._checkpoint} contains adapters without their base model, and that model "
                f"({self._directory or self._digest.model or 'unnamed'}) is not available as safetensors. Pass its "
                "directory as --model."
            )
        return self._directory


def _downloaded(name: str) -> Path | None:
    """Returns the directory ``name``, or the downloaded files of that Hub repository; None if neither exists."""
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

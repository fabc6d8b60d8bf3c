"""The model that the adapters of a checkpoint belong to, read from where it was loaded: checkpoints do not hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.weights.base import BaseDigest
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
        self._files: dict[str, Any] | None = None  # open files by tensor

    def has(self, name: str) -> bool:
        """Whether the tensor is one of the base's."""
        return name in self._digest.tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor.

        Raises:
            ConfigError: the base is not there, has no such tensor, or is another one.
        """
        files = self._opened()
        key = name.removeprefix(_INSIDE)
        key = ".".join(part for part in key.split(".") if part not in _OF_PEFT)
        if key not in files:
            raise ConfigError(f"{self._directory} has no {key}: it is not the model that the adapters belong to.")
        found = files[key].get_tensor(key).to(self._digest.dtype(name))
        self._digest.check_tensor(name, found, Path(str(self._directory)))
        return found.to(dtype)

    def _opened(self) -> dict[str, Any]:
        if self._files is None:
            from safetensors import safe_open

            paths = sorted(self._found().glob("*.safetensors"))
            opened = [safe_open(str(path), framework="pt") for path in paths]
            self._files = {key: file for file in opened for key in list(file.keys())}
        return self._files

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

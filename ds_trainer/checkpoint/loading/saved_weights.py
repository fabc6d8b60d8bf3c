"""Reads the weights that ``save_pretrained`` wrote: of a whole model, or of its adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from ds_trainer.checkpoint.loading.file_weights import open_weights
from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.checkpoint.shards.element_types import TYPES
from ds_trainer.checkpoint.weights.adapter_files import (
    CONFIGURATION_FILE,
    WEIGHTS_FILE,
    adapter_file_keys,
    base_parameter_names,
)
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.engine.state.buffers import persistent_buffers
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import read_json

_MAX_NAMES = 3  # names in a message


class SavedModelWeights:
    """The files of ``save_pretrained`` in a checkpoint.

    Args:
        directory: the directory of the checkpoint.
        model: provides names and shapes; keys are renamed and converted as in transformers.

    Attributes:
        types: dtypes of the floating-point tensors.
        other_shapes: shapes in the files of tensors that have another one in the model.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        self._directory = directory
        # A copy: otherwise only this rank's model would record the conversion of its keys.
        self._weights = open_weights(directory, copy.copy(model))
        self.types = _floating(tensor.dtype for tensor in stored_tensors(directory).values())
        self.other_shapes = {one.name: one.in_files for one in self._weights.mismatched}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise if the files lack one of ``tensors`` (model tensors by name), or contain others."""
        missing = [name for name in self._weights.missing if name in tensors]
        if missing or self._weights.unexpected:
            reasons = [f"it has no {listed(missing, _MAX_NAMES)}"] if missing else []
            if self._weights.unexpected:
                reasons.append(f"the model has no {listed(self._weights.unexpected, _MAX_NAMES)}")
            raise ConfigError(
                f"{self._directory} contains the weights of a different model: {'; '.join(reasons)}. Create the model "
                "that was trained."
            )

    def has(self, name: str) -> bool:
        """Whether this source holds the tensor."""
        return self._weights.has(name)

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        self._weights.fill(name, shard_slice, target)

    def close(self) -> None:
        """Close the files."""
        self._weights.close()


class SavedAdapterWeights:
    """The files of peft's ``save_pretrained`` in a checkpoint. The base is that of the model.

    Args:
        directory: the directory of the checkpoint.
        model: a model with the same adapters.

    Attributes:
        types: dtypes of the floating-point tensors.
        base: names and shapes of the tensors that the checkpoint does not contain.

    Raises:
        ConfigError: a prompt adapter, whose saved tensors are computed, or a missing file.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        from safetensors import safe_open

        self._directory = directory
        self._keys = adapter_file_keys(model)
        self._files = {}
        for path in {directory / folder / WEIGHTS_FILE for folder, _ in self._keys.values()}:
            if not path.is_file():
                raise ConfigError(
                    f"{directory} has no {path.relative_to(directory)}, but the model of this run has adapters. Create "
                    "the model that was trained."
                )
            self._files[path.parent] = safe_open(str(path), framework="pt")
        self._stored = {path: set(file.keys()) for path, file in self._files.items()}
        self.types = _floating(
            file.get_tensor(key).dtype for path, file in self._files.items() for key in self._stored[path]
        )
        named = base_parameter_names(model)
        tensors: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if name in named
        }
        tensors.update((name, buffer) for name, buffer in persistent_buffers(model) if name not in self._keys)
        config = directory / CONFIGURATION_FILE
        name_or_path = read_json(config).get("base_model_name_or_path") if config.is_file() else None
        self.base = BaseDigest(
            str(name_or_path or ""), {n: (TYPES[t.dtype], full_shape(t), "") for n, t in tensors.items()}
        )

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise if the files lack a trainable tensor of ``tensors``, or contain others."""
        missing = [name for name, tensor in tensors.items() if tensor.requires_grad and not self.has(name)]
        known = {(self._directory / folder, key) for folder, key in self._keys.values()}
        unexpected = [
            key for folder, keys in self._stored.items() for key in sorted(keys) if (folder, key) not in known
        ]
        if missing or unexpected:
            reasons = [f"it has no {listed(missing, _MAX_NAMES)}, which this run trains"] if missing else []
            reasons += [f"the model has no {listed(unexpected, _MAX_NAMES)}"] if unexpected else []
            raise ConfigError(
                f"{self._directory} contains different adapters: {'; '.join(reasons)}. peft saves only adapters and "
                "modules_to_save. Create the model that was trained, or start a new run."
            )

    def has(self, name: str) -> bool:
        """Whether this source holds the tensor."""
        if name not in self._keys:
            return False
        folder, key = self._keys[name]
        return key in self._stored[self._directory / folder]

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        folder, key = self._keys[name]
        tensor = self._files[self._directory / folder].get_tensor(key)
        if tuple(tensor.shape) != shard_slice.shape:
            raise ConfigError(
                f"{name} has shape {list(shard_slice.shape)} in this run, but {list(tensor.shape)} in "
                f"{self._directory}. Create the adapters that were trained."
            )
        copy_common(target, shard_slice, tensor.reshape(-1), ShardSlice.whole(tensor.shape))

    def close(self) -> None:
        """Close the files."""
        self._files.clear()


def _floating(types: Iterable[torch.dtype | None]) -> set[torch.dtype]:
    return {dtype for dtype in types if dtype is not None and dtype.is_floating_point}

"""Weights beside an optimizer's states that transformers wrote: a whole model, or the adapters of one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from ds_trainer.checkpoint.loading.file_weights import open_weights
from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.checkpoint.pieces.element_types import TYPES
from ds_trainer.checkpoint.weights.adapters import CONFIGURATION_FILE, WEIGHTS_FILE, base_names, written_names
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.engine.state.pieces import persistent_buffers
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json

_NAMED = 3  # names in a message


class SavedModel:
    """The files of ``save_pretrained`` in a checkpoint.

    Args:
        directory: of the checkpoint.
        model: names and shapes; transformers' renaming and conversion of keys applies.

    Attributes:
        types: of the elements of its floating-point tensors.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        self._directory = directory
        # A copy: on this rank alone it would learn by which rules its keys were converted.
        self._weights = open_weights(directory, copy.copy(model))
        self.types = _floating(one.dtype for one in stored_tensors(directory).values())

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse files that lack one of ``tensors`` (of the model, by name), or have more."""
        missing = [name for name in self._weights.missing if name in tensors]
        if missing or self._weights.unexpected:
            said = [f"it has no {_some(missing)}"] if missing else []
            said += [f"the model has no {_some(self._weights.unexpected)}"] if self._weights.unexpected else []
            raise ConfigError(
                f"{self._directory} holds the weights of another model: {'; '.join(said)}. Make the model that was "
                "trained."
            )

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        self._weights.fill(name, place, target)

    def close(self) -> None:
        self._weights.close()


class SavedAdapters:
    """The files of peft's ``save_pretrained`` in a checkpoint. The base is the one that the model has.

    Args:
        directory: of the checkpoint.
        model: with the same adapters.

    Attributes:
        types: of the elements of its floating-point tensors.
        base: names and shapes of the tensors that are not in the checkpoint.

    Raises:
        ConfigError: an adapter that is computed when it is saved (prompts), or a missing file.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        from safetensors import safe_open

        self._directory = directory
        self._keys = written_names(model)
        self._files = {}
        for path in {directory / folder / WEIGHTS_FILE for folder, _ in self._keys.values()}:
            if not path.is_file():
                raise ConfigError(
                    f"{directory} has no {path.relative_to(directory)}, and the model here has adapters. Make the "
                    "model that was trained."
                )
            self._files[path.parent] = safe_open(str(path), framework="pt")
        self._stored = {path: set(file.keys()) for path, file in self._files.items()}
        self.types = _floating(
            file.get_tensor(key).dtype for path, file in self._files.items() for key in self._stored[path]
        )
        named = base_names(model)
        tensors: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if name in named
        }
        tensors.update((name, buffer) for name, buffer in persistent_buffers(model) if name not in self._keys)
        config = directory / CONFIGURATION_FILE
        name_or_path = read_json(config).get("base_model_name_or_path") if config.is_file() else None
        self.base = BaseDigest(
            str(name_or_path or ""),
            {n: (TYPES[t.dtype], full_shape(t), "") for n, t in tensors.items()},
        )

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse files that lack one of ``tensors`` that are trained, or hold more."""
        missing = [name for name, tensor in tensors.items() if tensor.requires_grad and not self.has(name)]
        known = {(self._directory / folder, key) for folder, key in self._keys.values()}
        unexpected = [
            key for folder, keys in self._stored.items() for key in sorted(keys) if (folder, key) not in known
        ]
        if missing or unexpected:
            said = [f"it has no {_some(missing)}, which is trained here"] if missing else []
            said += [f"the model has no {_some(unexpected)}"] if unexpected else []
            raise ConfigError(
                f"{self._directory} holds other adapters: {'; '.join(said)}. peft saves adapters and modules_to_save, "
                "and nothing else that was trained; make the model that was trained, or begin a new run."
            )

    def has(self, name: str) -> bool:
        if name not in self._keys:
            return False
        folder, key = self._keys[name]
        return key in self._stored[self._directory / folder]

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        folder, key = self._keys[name]
        found = self._files[self._directory / folder].get_tensor(key)
        if tuple(found.shape) != place.shape:
            raise ConfigError(
                f"{name} has the shape {list(place.shape)} here, and {list(found.shape)} in {self._directory}: make "
                "the adapters that were trained."
            )
        target.copy_(found.reshape(-1))

    def close(self) -> None:
        self._files.clear()


def _floating(types: Iterable[torch.dtype | None]) -> set[torch.dtype]:
    return {one for one in types if one is not None and one.is_floating_point}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more

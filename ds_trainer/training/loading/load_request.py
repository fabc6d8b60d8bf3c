"""``LoadRequest``: what ``from_pretrained`` loads, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor
from ds_trainer.training.loading.build_on_meta import resolve_dtype
from ds_trainer.training.loading.model_class import resolve_model_class


@dataclass(frozen=True)
class LoadRequest:
    """A model to load from a directory.

    Attributes:
        name: the directory or Hub name that the user passed, for messages.
        directory: the directory of the files.
        config: the configuration of the model.
        auto_class: the requested class or its name; None for the class that the configuration names.
        dtype: the requested dtype or its name; None for that of the configuration or the files.
        allow_new_weights: patterns of names that the files may lack; True for all.
        key_mapping: patterns of keys in the files and their replacements.
        seed: seed of newly initialized weights.
        trust_remote_code: allow code from the repository.
    """

    name: str
    directory: Path
    config: Any
    auto_class: Any = None
    dtype: torch.dtype | str | None = None
    allow_new_weights: Sequence[str] | bool = ()
    key_mapping: Mapping[str, str] | None = None
    seed: int = 42
    trust_remote_code: bool = False

    def model_class(self) -> Any:
        """Returns the auto class or model class that builds the model.

        Raises:
            ConfigError: there is no such class.
        """
        return resolve_model_class(self.config, self.auto_class, self.name, self.trust_remote_code)

    def weight_dtype(self, stored: Mapping[str, StoredTensor]) -> torch.dtype:
        """Returns the dtype of the weights, given the tensors in the files.

        Raises:
            ConfigError: the requested dtype is not a floating-point dtype of torch.
        """
        return resolve_dtype(self.dtype, self.config, lambda: _first_floating_dtype(stored))


def _first_floating_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    dtypes = (tensor.dtype for tensor in stored.values() if tensor.dtype is not None)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

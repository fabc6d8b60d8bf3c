"""Finds the input embeddings of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.data.columns import base_model


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The result of ``get_input_embeddings()`` of ``model`` (of the base model if it is a PEFT model), or None."""
    return _embeddings_of(base_model(model))


def all_input_embeddings(model: nn.Module) -> list[nn.Module]:
    """The input embeddings of all submodules of ``model``, each once."""
    embeddings = (_embeddings_of(part) for part in model.modules())
    return list(dict.fromkeys(module for module in embeddings if module is not None))


def _embeddings_of(model: Any) -> nn.Module | None:
    getter = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        module = getter()
    except NotImplementedError:  # transformers' base class has the method for every model
        return None
    return module if isinstance(module, nn.Module) else None

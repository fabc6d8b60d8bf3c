"""Where a model turns its inputs into vectors."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.data.columns import base_model


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The module that ``get_input_embeddings()`` of ``model`` (of the one inside a PEFT model) names; None without."""
    return _named_by(base_model(model))


def all_input_embeddings(model: nn.Module) -> list[nn.Module]:
    """Those of every part of ``model`` that has some, each once."""
    found = (_named_by(part) for part in model.modules())
    return list(dict.fromkeys(module for module in found if module is not None))


def _named_by(model: Any) -> nn.Module | None:
    getter = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        module = getter()
    except NotImplementedError:  # transformers' base class has the method for every model
        return None
    return module if isinstance(module, nn.Module) else None

"""The labels in a batch, and the predictions in a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.training.signatures import parameters_of


def returns_loss_by_default(model: nn.Module) -> bool:
    """Whether ``model.forward`` has an argument ``return_loss`` that is on by default."""
    parameter = parameters_of(model.forward).get("return_loss")
    return parameter is not None and parameter.default is True


def labels_of(inputs: Any, names: Sequence[str]) -> Any:
    """The labels of a batch: a tensor, a tuple of several, or None, also if it is no mapping."""
    if not isinstance(inputs, Mapping):
        return None
    labels = tuple(inputs[name] for name in names if inputs.get(name) is not None)
    return labels[0] if len(labels) == 1 else labels or None


def predictions_of(outputs: Any, ignored: Sequence[str]) -> Any:
    """A model's predictions: its outputs without the loss and without the ``ignored`` keys.

    The values of a mapping or the elements of a tuple, as a tuple; a single one is not wrapped. The loss is ``"loss"``
    in a mapping, or a leading scalar (or None) in a tuple.
    """
    if isinstance(outputs, Mapping):
        kept = tuple(value for key, value in outputs.items() if key != "loss" and key not in ignored)
    elif isinstance(outputs, (tuple, list)):
        leads = len(outputs) > 0 and (outputs[0] is None or _is_scalar(outputs[0]))
        kept = tuple(outputs[1:] if leads else outputs)
    else:
        return None if _is_scalar(outputs) else outputs
    return kept[0] if len(kept) == 1 else kept or None


def loss_of_outputs(outputs: Any) -> torch.Tensor | None:
    """The loss that a model returned although it got no labels: what :func:`predictions_of` leaves out."""
    if isinstance(outputs, Mapping):
        first = outputs.get("loss")
    else:
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    return first if _is_scalar(first) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0

"""What of a batch are labels, and what of a model's outputs are predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.training.signatures import parameters_of


def returns_loss_by_itself(model: nn.Module) -> bool:
    """Whether ``model.forward`` has an argument ``return_loss`` that is on by default."""
    parameter = parameters_of(model.forward).get("return_loss")
    return parameter is not None and parameter.default is True


def labels_of(inputs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The labels of a batch: alone where there is one kind, a tuple of several, None without."""
    found = tuple(inputs[name] for name in names if inputs.get(name) is not None)
    return found[0] if len(found) == 1 else found or None


def without_loss(outputs: Any, ignored: Sequence[str]) -> Any:
    """What a model predicted: its outputs without the loss and without the ``ignored`` keys.

    Of a mapping its values in their order, of a tuple its elements; a single one stands alone. A loss is ``"loss"``
    of a mapping, or a leading scalar (or None) of a tuple.
    """
    if isinstance(outputs, Mapping):
        kept = tuple(value for key, value in outputs.items() if key != "loss" and key not in ignored)
    elif isinstance(outputs, (tuple, list)):
        leads = len(outputs) > 0 and (outputs[0] is None or _is_scalar(outputs[0]))
        kept = tuple(outputs[1:] if leads else outputs)
    else:
        return None if _is_scalar(outputs) else outputs
    return kept[0] if len(kept) == 1 else kept or None


def loss_if_any(outputs: Any) -> torch.Tensor | None:
    """The loss that a model returned without being given labels: what :func:`without_loss` leaves out."""
    if isinstance(outputs, Mapping):
        first = outputs.get("loss")
    else:
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    return first if _is_scalar(first) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0

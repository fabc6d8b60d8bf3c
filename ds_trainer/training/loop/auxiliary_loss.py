"""Auxiliary losses: terms that a model adds to its loss and that are not a sum over items.

A mixture of experts adds the load-balancing loss of its router (a z-loss, ...) to the cross-entropy. The term is a mean
over the micro-batch times a coefficient. A model that divides its cross-entropy by the items ``N`` of the global batch
does not divide this term, so its weight would grow with the number of micro-batches and ranks. Correct is the mean of
the terms ``a_i`` of the micro-batches, weighted by their items ``n_i``::

    loss of the step = sum_i (S_i / N + a_i * n_i / N) = sum_i n_i / N * (S_i / n_i + a_i)

``S_i`` is the sum of the losses of the items of micro-batch ``i``. So such a model gets ``n_i`` as the number of items,
and its loss is weighted by ``n_i / N``. This is exact for all terms and coefficients, and needs to know none of them.

Source of the loss: Fedus et al. 2021, "Switch Transformers", section 2.2; ``load_balancing_loss_func`` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import forward_names
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_TOLERANCE = 1e-3  # fraction of a loss: more than rounding in float32
_SWITCH = "output_router_logits"
_IN_CONFIG = (_SWITCH, "z_loss_coefficient")
_OUTPUTS = ("aux_loss", "z_loss")  # suffixes of output names


def adds_auxiliary_loss(model: nn.Module) -> bool:
    """Whether ``model`` may add an auxiliary loss to its loss.

    A custom model declares it with an attribute ``adds_auxiliary_loss = True``. Models of transformers have an argument
    ``output_router_logits`` that enables it, or a ``z_loss_coefficient`` in their config (Bamba).

    Args:
        model: the innermost model.
    """
    declared = getattr(model, "adds_auxiliary_loss", None)
    if isinstance(declared, bool):
        return declared
    config = getattr(model, "config", None)
    return _SWITCH in forward_names(model) or any(bool(getattr(config, name, None)) for name in _IN_CONFIG)


def shows_auxiliary_loss(outputs: Any) -> bool:
    """Whether the outputs of a model have a tensor whose name ends with ``aux_loss`` or ``z_loss``."""
    if not isinstance(outputs, Mapping):
        return False
    return any(str(name).endswith(_OUTPUTS) and isinstance(v, torch.Tensor) for name, v in outputs.items())


def with_unmasked_tokens(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with an ``attention_mask`` that does not mask all tokens.

    With sequence sharding, the tokens of one rank may be padding only. Then the mean of a router over its tokens would
    be 0 / 0, and its gradient nan although its weight is 0. Attention over sharded sequences does not read this mask.
    Does not wait for the device.
    """
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return inputs
    return {**inputs, "attention_mask": torch.where(mask.any(), mask, torch.ones_like(mask))}


def undivided_part(items: torch.Tensor, share: torch.Tensor) -> float:
    """The fraction of ``share`` that is not divided by ``items``: 0 for none, 1 for all of it. Waits for the device.

    For a loss ``S / N + A``, the derivative with respect to ``N``, times ``N``, is ``-S / N``.

    Args:
        items: ``N``, a leaf that requires gradient.
        share: the loss that was computed from it. Both must have their gradients; otherwise the result is 0.
    """
    if items.grad is None or share.grad is None:
        return 0.0
    value = (share.grad * share).detach()
    part = float((value + items.detach() * items.grad) / value)
    return part if math.isfinite(part) else 0.0


def warn_of_undivided_part(items: torch.Tensor, share: torch.Tensor) -> bool:
    """Warn if a part of the loss counts once for each micro-batch (:func:`undivided_part`); returns whether it did."""
    part = undivided_part(items, share)
    if abs(part) > _TOLERANCE:
        logger.warning(
            "%.1f %% of the first micro-batch's loss does not depend on num_items_in_batch, although the rest is "
            "divided by it: this part counts once for each micro-batch of each rank. Multiply it by the items of the "
            "micro-batch and divide it by num_items_in_batch. If the model adds it as an auxiliary loss, set "
            "`adds_auxiliary_loss = True` on the model instead, and the Trainer does this.",
            100 * part,
        )
    return abs(part) > _TOLERANCE

"""Auxiliary losses: terms that a model adds to its loss and that are no sum over items.

A mixture of experts adds its router's load-balancing loss (a z-loss, ...) to the cross-entropy: a mean over the
micro-batch, times a coefficient. A model that divides its cross-entropy by the items ``N`` of the global batch adds
that term undivided, so that its weight grows with the number of micro-batches and ranks. It has to count once: as the
mean of the micro-batches' own terms ``a_i``, weighted with their items ``n_i``::

    loss of the step = sum_i (S_i / N + a_i * n_i / N) = sum_i n_i / N * (S_i / n_i + a_i)

``S_i`` is the sum of the losses of the items of micro-batch ``i``. So such a model is given ``n_i`` for the number of
items, and what it returns is weighted with ``n_i / N``. That is exact for every term and every coefficient, and none of
them has to be known.

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

_NOTICED = 1e-3  # of a loss: more than rounding in float32
_SWITCH = "output_router_logits"
_IN_CONFIG = (_SWITCH, "z_loss_coefficient")
_OUTPUTS = ("aux_loss", "z_loss")  # of the names of outputs, their ends


def adds_auxiliary_loss(model: nn.Module) -> bool:
    """Whether ``model`` may add an auxiliary loss to its loss.

    A model of your own says so by an attribute ``adds_auxiliary_loss = True``. Those of transformers have an argument
    ``output_router_logits`` that switches it on, or a ``z_loss_coefficient`` in their config (Bamba).

    Args:
        model: the innermost model.
    """
    declared = getattr(model, "adds_auxiliary_loss", None)
    if isinstance(declared, bool):
        return declared
    config = getattr(model, "config", None)
    return _SWITCH in forward_names(model) or any(bool(getattr(config, name, None)) for name in _IN_CONFIG)


def shows_auxiliary_loss(outputs: Any) -> bool:
    """Whether a model's outputs have a value whose name ends with ``aux_loss`` or ``z_loss``."""
    if not isinstance(outputs, Mapping):
        return False
    return any(str(name).endswith(_OUTPUTS) and isinstance(v, torch.Tensor) for name, v in outputs.items())


def with_unmasked_tokens(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with an ``attention_mask`` that masks some tokens or none, but not all.

    A rank's part of cut sequences may hold nothing but padding. A router's mean over its tokens would be 0 / 0, and its
    gradient nan although it is weighted with 0. Attention over a cut sequence does not read this mask. No
    synchronisation.
    """
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return inputs
    return {**inputs, "attention_mask": torch.where(mask.any(), mask, torch.ones_like(mask))}


def undivided_part(items: torch.Tensor, share: torch.Tensor) -> float:
    """How much of ``share`` is not divided by ``items``: 0 for none of it, 1 for all. Waits for the device.

    For a loss of ``S / N + A`` the derivative by ``N``, times ``N``, is ``-S / N``.

    Args:
        items: ``N``, a leaf that requires gradient.
        share: computed from it; both after the backward pass, with their gradients. 0 where they have none.
    """
    if items.grad is None or share.grad is None:
        return 0.0
    value = (share.grad * share).detach()
    part = float((value + items.detach() * items.grad) / value)
    return part if math.isfinite(part) else 0.0


def warn_of_undivided_part(items: torch.Tensor, share: torch.Tensor) -> None:
    """Warn where part of a loss counts once for each micro-batch (:func:`undivided_part`)."""
    part = undivided_part(items, share)
    if abs(part) > _NOTICED:
        logger.warning(
            "%.1f %% of the first micro-batch's loss does not depend on num_items_in_batch, although the rest is "
            "divided by it: this part counts once for each micro-batch of each rank. Weight it with the items of the "
            "micro-batch over num_items_in_batch. A model that adds it by itself can leave that to the Trainer: set "
            "`adds_auxiliary_loss = True` on it.",
            100 * part,
        )

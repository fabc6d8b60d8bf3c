"""``LossMean``: the exact mean loss over all items of a dataset, equal for every layout."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ds_trainer.training.item_count import count_for
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class Loss(NamedTuple):
    """Mean loss per item (nats where the loss is a cross-entropy), and the number of items of all batches."""

    mean: float
    items: int


class LossMean:
    """Adds up the mean losses of batches, each weighted with its items, and divides once at the end.

    So batches of different sizes, padding and the number of ranks change nothing. Nothing waits for the device before
    the end.

    Args:
        device: where the losses are.
        filtered: leave batches whose loss is not finite out of the mean, with a warning that counts them.
        counts: whether this rank's batches count: of the ranks of a replica, which have the same, one does.
    """

    def __init__(self, device: torch.device, filtered: bool, counts: bool = True) -> None:
        self._device = device
        self._filtered = filtered
        self._counts = counts
        # float64, where the device has it: thousands of batches must not cost digits. Loss, items, and of finite
        # losses alone: loss, items; batches that are not finite; batches.
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, items: torch.Tensor) -> None:
        """Add a batch: the mean loss over its ``items`` (a count), a scalar. A mean over nothing counts for nothing."""
        if not self._counts:
            return
        items = count_for(self._device, items).double()
        loss = loss.detach().to(self._device).double().mean()
        total = torch.where(items > 0, loss * items, 0.0)
        finite = total.isfinite()
        zero = torch.zeros_like(total)
        values = [total, items, torch.where(finite, total, zero), torch.where(finite, items, zero)]
        self._sums += torch.stack([*values, (~finite).double(), torch.ones_like(total)])

    def result(self) -> Loss | None:
        """The mean over all batches of all ranks; None where there was no batch. Collective."""
        distributed.all_reduce_sum(self._sums)
        total, items, finite_total, finite_items, lost, batches = self._sums.tolist()
        if not batches:
            return None
        if self._filtered and lost and finite_items:
            logger.warning(
                "%d of %d batches of an evaluation had a loss that is not finite; the mean leaves them out. "
                "logging_nan_inf_filter=False shows them.",
                int(lost),
                int(batches),
            )
            total, counted = finite_total, finite_items
        else:
            counted = items
        return Loss(total / counted if counted else math.nan, int(items))

"""``LossMean``: the exact mean loss over all items of a dataset, equal for every layout."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ds_trainer.training.loop.item_count import count_for
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class Loss(NamedTuple):
    """Mean loss per item (nats where the loss is a cross-entropy), and the number of items of all batches."""

    mean: float
    items: int


class LossMean:
    """Sums the mean losses of batches, each weighted by its items, and divides once at the end.

    So batch sizes, padding and the number of ranks do not change the result. Nothing synchronizes the device before the
    end.

    Args:
        device: device of the losses.
        filtered: leave batches with a non-finite loss out of the mean, with a warning that counts them.
        counts: whether this rank's batches count: those of the first rank of each replica do.

    Attributes:
        summed: the losses are sums, which are added up without weights.
        parts: what one item counts.
    """

    summed = False
    parts = 1

    def __init__(self, device: torch.device, filtered: bool, counts: bool = True) -> None:
        self._device = device
        self._filtered = filtered
        self._counts = counts
        # float64, so that thousands of batches cost no precision: loss, items; loss and items of the batches with a
        # finite loss; number of batches with a non-finite loss; number of batches.
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, items: torch.Tensor) -> None:
        """Add a batch: the mean loss over its ``items`` (a count), a scalar. A batch without items does not count."""
        if not self._counts:
            return
        items = count_for(self._device, items).double()
        loss = loss.detach().to(self._device).double().mean()
        # A mean over nothing is nan; infinite is what a count of 0 divides, and is missing in the sum.
        total = torch.where((items > 0) | loss.isinf(), loss if self.summed else loss * items, 0.0)
        finite = total.isfinite()
        zero = torch.zeros_like(total)
        values = [total, items, torch.where(finite, total, zero), torch.where(finite, items, zero)]
        self._sums += torch.stack([*values, (~finite).double(), torch.ones_like(total)])

    def result(self) -> Loss | None:
        """The mean over all batches of all ranks; None if there was no batch. Collective."""
        distributed.all_reduce_sum(self._sums)
        total, items, finite_total, finite_items, lost, batches = self._sums.tolist()
        if not batches:
            return None
        if self._filtered and lost and finite_items:
            logger.warning(
                "%d of %d batches of an evaluation had a non-finite loss and are left out of the mean. To include "
                "them, set logging_nan_inf_filter=False.",
                int(lost),
                int(batches),
            )
            total, counted = finite_total, finite_items
        else:
            counted = items
        divisor = min(counted, 1) if self.summed else counted
        return Loss(total / divisor if counted else math.nan, int(items / self.parts))

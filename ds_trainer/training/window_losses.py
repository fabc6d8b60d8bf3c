"""``WindowLosses``: the losses since the last log, kept on the device until they are asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = get_logger(__name__)

# Steps kept as tensors of their own before they are put together; bounds the number of small tensors.
_CHUNK = 1024


class WindowLosses:
    """Loss of every step of a logging window.

    Args:
        device: where the losses are.
        filtered: leave steps whose loss is not finite out of the mean. They are counted, and a warning is given the
            first time.
        group: ranks whose shares add up to the loss; default: all.
    """

    def __init__(self, device: torch.device, filtered: bool, group: ProcessGroup | None = None) -> None:
        self._device = device
        self._filtered = filtered
        self._group = group
        self._warned = False
        self._steps: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []
        self._present: torch.Tensor | None = None

    def add(self, share: torch.Tensor) -> None:
        """Add this rank's share of one micro-batch: a scalar."""
        self._present = share if self._present is None else self._present + share

    def end_step(self) -> None:
        """The optimizer step is over: what was added is its loss."""
        self._steps.append(torch.zeros((), device=self._device) if self._present is None else self._present)
        self._present = None
        if len(self._steps) == _CHUNK:
            self._put_together()

    def forget(self) -> None:
        """Begin a new window: the run has gone back, and what was added is no part of it."""
        self._steps, self._chunks, self._present = [], [], None

    def close(self) -> tuple[float, int]:
        """Mean loss of the window over all ranks and the number of steps in it; begins a new window. Collective.

        Where no step had a finite loss, the mean is NaN over 0 steps.
        """
        self._put_together()
        losses = torch.cat(self._chunks)
        self._chunks = []
        distributed.all_reduce_sum(losses, group=self._group)
        if self._filtered:
            finite = losses[losses.isfinite()]
            if finite.numel() < losses.numel() and not self._warned:
                self._warned = True
                logger.warning(
                    "%d of %d steps had a loss that is not finite; the logged loss leaves them out and their number is "
                    "logged. logging_nan_inf_filter=False shows them.",
                    losses.numel() - finite.numel(),
                    losses.numel(),
                )
            losses = finite
        return (float(losses.mean()), losses.numel()) if losses.numel() else (math.nan, 0)

    def _put_together(self) -> None:
        if self._steps:
            self._chunks.append(torch.stack(self._steps).double())
            self._steps = []

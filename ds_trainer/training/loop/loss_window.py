"""``LossWindow``: the losses since the last log, kept on the device until they are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ds_trainer.training.loop.source_losses import SourceSums
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = get_logger(__name__)

# Steps whose scalar tensors are kept before they are stacked; limits the number of small tensors.
_CHUNK = 1024


class LossWindow:
    """The loss of every step in a logging window.

    Args:
        device: the device of the losses.
        filtered: whether to exclude steps with a non-finite loss from the mean. They are counted, with one warning.
        group: ranks whose contributions add up to the loss; default: all.
        by_source: losses of each source in the same steps.
    """

    def __init__(
        self,
        device: torch.device,
        filtered: bool,
        group: ProcessGroup | None = None,
        by_source: SourceSums | None = None,
    ) -> None:
        self._device = device
        self._by_source = by_source
        self._filtered = filtered
        self._group = group
        self._warned = False
        self._steps: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Begin a step, or begin it again."""
        if self._by_source is not None:
            self._by_source.begin_step()

    def add_step(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add and return the loss of one optimizer step: the contributions of the micro-batches of this rank."""
        total = functools.reduce(torch.add, contributions) if contributions else torch.zeros((), device=self._device)
        self._steps.append(total)
        if self._by_source is not None:
            self._by_source.end_step()
        if len(self._steps) == _CHUNK:
            self._stack_steps()
        return total

    def forget(self) -> None:
        """Begin a new window after a rollback."""
        self._steps, self._chunks = [], []
        if self._by_source is not None:
            self._by_source.forget()

    def close_sources(self) -> dict[str, float]:
        """Mean loss of each source in the steps of the window, by log key (``loss/NAME``). Collective."""
        by_source = {} if self._by_source is None else self._by_source.close()
        return {f"loss/{name}": loss for name, loss in by_source.items()}

    def close(self) -> tuple[float, int]:
        """Return the mean loss of the window and its number of steps, and begin a new window. Collective.

        If no step had a finite loss, the mean is NaN over 0 steps.
        """
        self._stack_steps()
        losses = torch.cat(self._chunks)
        self._chunks = []
        distributed.all_reduce_sum(losses, group=self._group)
        if self._filtered:
            finite = losses[losses.isfinite()]
            if finite.numel() < losses.numel() and not self._warned:
                self._warned = True
                logger.warning(
                    "%d of %d steps had a non-finite loss; the logged loss excludes them, and their number is logged. "
                    "To include them, set logging_nan_inf_filter=False.",
                    losses.numel() - finite.numel(),
                    losses.numel(),
                )
            losses = finite
        return (float(losses.mean()), losses.numel()) if losses.numel() else (math.nan, 0)

    def _stack_steps(self) -> None:
        if self._steps:
            self._chunks.append(torch.stack(self._steps).double())
            self._steps = []

"""The item count of a global batch, while the ranks are still adding it up.

Only the last operation of a loss needs the count. So the all-reduce runs while the first forward pass does: the loss
is divided by an estimate that every rank has at once, its own count times the number of ranks (the same order of
magnitude, so that no number format overflows). The share of the micro-batch is corrected by ``estimate / count`` when
the count is there. The correction is exact, and nobody waits for the slowest rank at the beginning of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class ItemCount:
    """Items of one global batch: exact at once, or an estimate first.

    Attributes:
        divisor: what losses are divided by in the forward pass: a float32 scalar, at least 1.
    """

    def __init__(self, divisor: torch.Tensor, total: torch.Tensor | None = None, work: Work | None = None) -> None:
        self.divisor = divisor
        self._total = total
        self._work = work
        self._exact = divisor if total is None else None

    @classmethod
    def of_all_ranks(cls, own: torch.Tensor, overlap: bool, group: ProcessGroup | None = None) -> ItemCount:
        """The sum of every rank's ``own`` (int64 scalar on the device of the collective). Collective.

        Args:
            own: items of this rank's micro-batches; reduced in place.
            overlap: begin with an estimate instead of waiting.
            group: ranks that hold different items; default: all. Tensor-parallel ranks hold the same ones.
        """
        ranks = distributed.group_size(group)
        if ranks == 1:
            return cls(_divisor(own))
        if not overlap:
            distributed.all_reduce_sum(own, group=group)
            return cls(_divisor(own))
        estimate = _divisor(own * ranks)
        return cls(estimate, own, distributed.all_reduce_sum(own, group=group, async_op=True))

    @property
    def is_exact(self) -> bool:
        """Whether ``divisor`` is the count itself."""
        return self._exact is self.divisor

    def exact(self) -> torch.Tensor:
        """The count: a float32 scalar, at least 1. Waits for the other ranks the first time it is asked for."""
        if self._exact is None:
            assert self._work is not None and self._total is not None  # set together
            self._work.wait()
            self._exact = _divisor(self._total)
        return self._exact


def count_for(device: torch.device, count: torch.Tensor) -> torch.Tensor:
    """``count``, a scalar, on ``device``, without waiting for it.

    A count in host memory is read there and becomes a tensor by a kernel that fills the number in; copying it would
    wait for the device, since the memory is pageable.
    """
    return count if count.device == device else torch.full((), int(count), dtype=count.dtype, device=device)


def _divisor(items: torch.Tensor) -> torch.Tensor:
    """A batch without any target has a gradient of zero, not of nan."""
    return items.clamp(min=1).to(torch.float32)

"""The item count of a global batch, whose all-reduce runs during the first forward pass.

Only the last operation of a loss needs the count. So the forward pass divides by an estimate: the local count times the
number of ranks (the same order of magnitude, so no number format overflows). When the count is known, the contribution
of the micro-batch is multiplied by ``estimate / count``. The correction is exact, and no rank waits for the slowest one
at the beginning of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.data.batch_structure import number_of_samples
from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from ds_trainer.parallel.layout import ParallelLayout


class ItemCount:
    """Item count of one global batch: exact from the start, or an estimate first.

    Attributes:
        divisor: divisor of the losses in the forward pass: a float32 scalar, at least 1.
        is_exact: whether ``divisor`` is the count itself.
        counted: what the loop has counted, of which losses that are means are parts; another one if a script counts.
    """

    def __init__(
        self,
        divisor: torch.Tensor,
        total: torch.Tensor | None = None,
        work: Work | None = None,
        counted: ItemCount | None = None,
    ) -> None:
        self.divisor, self.counted = divisor, counted or self
        self._total = total
        self._work = work
        self._exact = divisor if total is None else None
        self.is_exact = total is None

    @classmethod
    def of_all_ranks(cls, own: torch.Tensor, overlap: bool, group: ProcessGroup | None = None) -> ItemCount:
        """The sum of ``own`` (int64 scalar on the device of the collective) over all ranks. Collective.

        Args:
            own: items of the micro-batches of this rank.
            overlap: begin with an estimate instead of waiting.
            group: ranks that have different items; default: all. Tensor-parallel ranks have the same items.
        """
        ranks = distributed.group_size(group)
        if ranks == 1:
            return cls(_divisor(own))
        total = own.clone()
        if not overlap:
            distributed.all_reduce_sum(total, group=group)
            return cls(_divisor(total))
        estimate = _divisor(own * ranks)
        return cls(estimate, total, distributed.all_reduce_sum(total, group=group, async_op=True))

    def exact(self) -> torch.Tensor:
        """The count: a float32 scalar, at least 1. The first call waits for the other ranks."""
        if self._exact is None:
            assert self._work is not None and self._total is not None  # set together
            self._work.wait()
            self._exact = _divisor(self._total)
        return self._exact


def count_of_script(
    given: Any, batches: Sequence[Any], count: Callable[[Any], torch.Tensor], layout: ParallelLayout
) -> torch.Tensor:
    """The items of the global batch, where a script has counted ``batches`` itself, perhaps those of its rank only.

    It has if ranks differ, or if each has the number of its own items or samples. Collective.

    Args:
        given: what it returned.
        batches: the micro-batches of this replica.
        count: counts the items of one.
        layout: the layout of the job.
    """
    given = torch.as_tensor(given, dtype=torch.float64).cpu()
    own = [sum(int(count(batch)) for batch in batches), sum(map(number_of_samples, batches))]
    most, minus_least, *others = distributed.largest(
        torch.tensor([given, -given, *(float(given) != number for number in own)], dtype=torch.float64)
    ).tolist()
    if layout.dp == 1 or (most == -minus_least and all(others)):
        return given
    total = given.to(distributed.collective_device())
    distributed.all_reduce_sum(total)
    return total / layout.replica_size


def count_for(device: torch.device, count: torch.Tensor) -> torch.Tensor:
    """Move the scalar ``count`` to ``device`` without waiting for the device.

    A count in host memory is read there, and a kernel fills a new tensor with the number. A copy would wait for the
    device, because the memory is not pinned.
    """
    return count if count.device == device else torch.full((), int(count), dtype=count.dtype, device=device)


def _divisor(items: torch.Tensor) -> torch.Tensor:
    """At least 1, so that a batch without targets has a gradient of zero and not nan."""
    return items.to(torch.float32).clamp_(min=1)

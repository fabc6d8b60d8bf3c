"""``BatchPlan``: which samples of an epoch belong to which step, micro-batch and replica.

The order of samples depends only on the seed and the epoch. A global batch is a run of consecutive samples in that
order; the layout only decides which rank holds which sample. So every layout sees the same global batches, and a run
can change its layout midway without changing its batches.

An epoch of ``n`` samples is divided into *micro-steps*: one micro-batch on every replica. ``accumulation`` micro-steps
make one optimizer step; the last step of an epoch may have fewer. The last micro-step may be ragged: its samples are
distributed in order, as evenly as possible (in training) or so that all micro-batches but one are whole. A replica that
gets none works on a dummy batch with weight zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic of one layout. All counts are in samples unless the name says otherwise.

    Args:
        layout: owner of the data-parallel size.
        micro_batch: samples that one replica processes in one forward pass.
        accumulation: micro-steps (micro-batches of each replica) per optimizer step.
        drop_last: drop the samples of a ragged last micro-step.
        whole_batches: the micro-batches of a ragged last micro-step are those of one replica. A loss that compares the
            samples of a micro-batch (CLIP, negatives in the batch) is then that of one replica.
    """

    layout: ParallelLayout
    micro_batch: int
    accumulation: int = 1
    drop_last: bool = False
    whole_batches: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r} must be a positive integer."
            for name, value in (("micro_batch", self.micro_batch), ("accumulation", self.accumulation))
            if not isinstance(value, int) or value < 1
        ]
        if problems:
            raise ConfigError(problems)

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def samples_per_micro_step(self) -> int:
        """Samples of one full micro-step over all replicas."""
        return self.micro_batch * self.layout.dp

    @property
    def global_batch_size(self) -> int:
        """Samples of one full optimizer step."""
        return self.samples_per_micro_step * self.accumulation

    def describe(self) -> str:
        """The global batch written out as a product."""
        return (
            f"{self.global_batch_size} = {self.micro_batch} per device x {self.accumulation} accumulation "
            f"x {self.layout.dp} data parallel"
        )

    # -- one epoch ------------------------------------------------------------------------------------------------

    def samples_used(self, samples: int) -> int:
        """Samples of an epoch of ``samples`` that training uses."""
        return samples // self.samples_per_micro_step * self.samples_per_micro_step if self.drop_last else samples

    def micro_steps(self, samples: int) -> int:
        """Micro-steps of one epoch of ``samples``."""
        return math.ceil(self.samples_used(samples) / self.samples_per_micro_step)

    def steps(self, samples: int) -> int:
        """Optimizer steps of one epoch of ``samples``."""
        return math.ceil(self.micro_steps(samples) / self.accumulation)

    def rank_samples(self, micro_step: int, dp_rank: int, samples: int) -> range:
        """Positions in the epoch's order that replica ``dp_rank`` holds in ``micro_step``; may be empty."""
        start = micro_step * self.samples_per_micro_step
        size = min(self.samples_per_micro_step, self.samples_used(samples) - start)
        if size == self.samples_per_micro_step or self.whole_batches:
            first = start + min(dp_rank * self.micro_batch, size)
            return range(first, min(first + self.micro_batch, start + size))
        return range(start + size * dp_rank // self.layout.dp, start + size * (dp_rank + 1) // self.layout.dp)


def smaller_micro_batch(micro_batch: int, accumulation: int) -> tuple[int, int]:
    """At most half the micro-batch, with more accumulation for the same product of both.

    Raises:
        ValueError: the micro-batch is one sample.
    """
    product = micro_batch * accumulation
    for size in range(micro_batch // 2, 0, -1):
        if product % size == 0:
            return size, product // size
    raise ValueError("a micro-batch of one sample cannot be smaller")

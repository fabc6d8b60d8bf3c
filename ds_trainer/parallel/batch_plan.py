"""``BatchPlan``: which samples of an epoch belong to which step, micro-batch and replica.

The order of samples follows from seed and epoch alone. A global batch is a run of consecutive samples of that order;
the layout only decides who holds which. So every layout sees the same global batches, and a run can change its layout
in the middle without anybody seeing another batch.

One epoch of ``n`` samples is cut into *rounds*: in a round every replica works on one micro-batch. ``accumulation``
rounds make an optimizer step; the last step of an epoch may have fewer. The last round may be ragged: its samples are
dealt out as evenly as possible, in order, and a replica that gets none works on a filler that counts for nothing.
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
        micro_batch: samples of one replica in one forward pass.
        accumulation: rounds (micro-batches of each replica) of one optimizer step.
        drop_last: leave out the samples of a ragged last round.
    """

    layout: ParallelLayout
    micro_batch: int
    accumulation: int = 1
    drop_last: bool = False

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
    def round_size(self) -> int:
        """Samples of one full round, all replicas together."""
        return self.micro_batch * self.layout.dp

    @property
    def step_size(self) -> int:
        """Samples of one full optimizer step: the global batch."""
        return self.round_size * self.accumulation

    def describe(self) -> str:
        """The global batch written out as a product."""
        return (
            f"{self.step_size} = {self.micro_batch} per device x {self.accumulation} accumulation "
            f"x {self.layout.dp} data parallel"
        )

    # -- one epoch ------------------------------------------------------------------------------------------------

    def samples_used(self, samples: int) -> int:
        """Samples of an epoch of ``samples`` that are trained on."""
        return samples // self.round_size * self.round_size if self.drop_last else samples

    def rounds(self, samples: int) -> int:
        """Rounds of one epoch of ``samples``."""
        return math.ceil(self.samples_used(samples) / self.round_size)

    def steps(self, samples: int) -> int:
        """Optimizer steps of one epoch of ``samples``."""
        return math.ceil(self.rounds(samples) / self.accumulation)

    def rounds_of_step(self, step: int, rounds: int) -> int:
        """Rounds of optimizer step ``step`` (counted from 0 in the epoch) of an epoch of ``rounds``."""
        return min(self.accumulation, rounds - step * self.accumulation)

    def share(self, round_index: int, dp_rank: int, samples: int) -> range:
        """Positions in the epoch's order that replica ``dp_rank`` holds in round ``round_index``; may be empty."""
        start = round_index * self.round_size
        size = min(self.round_size, self.samples_used(samples) - start)
        if size == self.round_size:
            first = start + dp_rank * self.micro_batch
            return range(first, first + self.micro_batch)
        return range(start + size * dp_rank // self.layout.dp, start + size * (dp_rank + 1) // self.layout.dp)

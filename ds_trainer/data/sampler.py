"""The order of samples, and the batches of each replica.

The order of an epoch depends on seed and epoch alone, and any micro-step can be reached in constant time, so resuming
costs nothing. Positions are looked up for several micro-steps at a time (:mod:`ds_trainer.data.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from ds_trainer.data.order import Order, epoch_order
from ds_trainer.parallel.batch_plan import BatchPlan

_MICRO_STEPS_TOGETHER = 64  # looked up at once: a single one costs about as much


class DistributedBatchSampler(Sampler[list[int]]):
    """Batch sampler: the dataset positions of one replica, one batch per micro-step.

    A replica without samples in an incomplete last micro-step gets the first sample of that micro-step as a dummy, so
    that all ranks run the same number of forward passes; see :meth:`is_dummy`.

    Args:
        plan: the batch arithmetic.
        samples: length of the dataset.
        dp_rank: index of the replica.
        seed: seed of the order.
        shuffle: False keeps the dataset's order (evaluation).
        order: returns the order of an epoch for its number, the global batch size (None: the default one) and the seed;
            default: :func:`ds_trainer.data.order.epoch_order`.

    Attributes:
        seed: seed of the order of the next iteration.
        epoch: the epoch of the next iteration.
        first_sample: index in its order at which the iteration begins; micro-steps are counted from there.
        ordered_for: global batch size for which the order is made; None: this plan's.
    """

    def __init__(
        self,
        plan: BatchPlan,
        samples: int,
        dp_rank: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int, int | None, int], Order] | None = None,
    ) -> None:
        self.plan = plan
        self.samples = samples
        self.dp_rank = dp_rank
        self.seed = seed
        self.shuffle = shuffle
        self.order = order
        self.epoch = 0
        self.first_sample = 0
        self.ordered_for: int | None = None
        self._cached: tuple[tuple[int, int | None, int], Order] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": None}  # a copy computes its own

    def __len__(self) -> int:
        return self.plan.micro_steps(self.samples)

    @property
    def batch_size(self) -> int:
        """Samples of a whole micro-batch of the replica."""
        return self.plan.micro_batch

    @property
    def drop_last(self) -> bool:
        """Whether the samples of an incomplete last micro-step are dropped."""
        return self.plan.drop_last

    @property
    def sampler(self) -> ReplicaSampler:
        """The positions one by one."""
        return ReplicaSampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def rest(self) -> int:
        """Number of samples from ``first_sample`` on."""
        return max(0, self.samples - self.first_sample)

    def seeds(self, micro_steps: range) -> list[int]:
        """Seeds for random numbers of the data; they depend on seed, epoch, replica and position in the epoch alone."""
        size = self.plan.samples_per_micro_step
        positions = (self.first_sample + micro_step * size for micro_step in micro_steps)
        # Hashes of integers are deterministic.
        return [hash((self.seed, self.epoch, position, self.dp_rank)) % 2**32 for position in positions]

    @property
    def first_ragged(self) -> int:
        """The first micro-step in which a replica may have no samples."""
        return max(0, self.plan.micro_steps(self.rest) - 1)

    def is_dummy(self, micro_step: int) -> bool:
        """Whether this replica has no samples in the micro-step."""
        return not self.plan.rank_samples(micro_step, self.dp_rank, self.rest)

    @property
    def replica_samples(self) -> int:
        """Samples of this replica in the iteration. All micro-batches but those of the last micro-step are whole."""
        first, end = self.first_ragged, self.plan.micro_steps(self.rest)
        last = sum(len(self._samples_of(index)) for index in range(first, end) if not self.is_dummy(index))
        return first * self.plan.micro_batch + last

    def __iter__(self) -> Iterator[list[int]]:
        micro_steps = self.plan.micro_steps(self.rest)
        for first in range(0, micro_steps, _MICRO_STEPS_TOGETHER):
            yield from self.rank_batches(range(first, min(first + _MICRO_STEPS_TOGETHER, micro_steps)))

    def rank_batch_of(self, micro_step: int) -> list[int]:
        """The batch of this replica in one micro-step."""
        return self.rank_batches(range(micro_step, micro_step + 1))[0]

    def positions(self, start: int, stop: int) -> list[int]:
        """Dataset positions of the samples ``start`` to ``stop`` of the epoch's order."""
        return self._order().at(np.arange(start, stop)).tolist()

    def _order(self) -> Order:
        key = (self.epoch, self.ordered_for, self.seed)
        if self._cached is None or self._cached[0] != key:
            if self.order is None:
                order = epoch_order(self.samples, self.seed, self.epoch, self.shuffle)
            else:
                order = self.order(*key)
            self._cached = (key, order)
        return self._cached[1]

    def rank_batches(self, micro_steps: range) -> list[RankBatch]:
        """The batches of this replica in some micro-steps."""
        ranges = [self._samples_of(index) for index in micro_steps]
        indices = self._order().at(self.first_sample + np.concatenate([np.arange(r.start, r.stop) for r in ranges]))
        end, batches = 0, []
        for samples, seed in zip(ranges, self.seeds(micro_steps), strict=True):
            start, end = end, end + len(samples)
            batches.append(RankBatch(indices[start:end].tolist(), seed))
        return batches

    def _samples_of(self, index: int) -> range:
        """Indices of a micro-step's samples, counted from ``first_sample``."""
        first = index * self.plan.samples_per_micro_step
        return self.plan.rank_samples(index, self.dp_rank, self.rest) or range(first, first + 1)


class ReplicaSampler(Sampler[int]):
    """The dataset positions that one replica reads in an epoch, in order, without those of its dummy batches.

    Args:
        batches: the batches of the replica.
    """

    def __init__(self, batches: DistributedBatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        for index, batch in enumerate(self.batches):
            if not self.batches.is_dummy(index):
                yield from batch

    def __len__(self) -> int:
        return self.batches.replica_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.batches.set_epoch(epoch)


class RankBatch(list[int]):
    """Dataset positions of a micro-batch, with the seed for random numbers while it is read (in workers)."""

    def __init__(self, positions: list[int], seed: int) -> None:
        super().__init__(positions)
        self.seed = seed

    def __reduce__(self) -> tuple[type[RankBatch], tuple[list[int], int]]:
        return RankBatch, (list(self), self.seed)

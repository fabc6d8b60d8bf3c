"""The order of samples and each replica's share of it.

The order of an epoch follows from seed and epoch alone (rule 2 of the architecture), and any round can be reached in
constant time, so resuming costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

from ds_trainer.parallel.batch_plan import BatchPlan


def epoch_order(samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Positions of the dataset in the order of ``epoch``: int64 ``[samples]``.

    The permutation is the one that accelerate's seedable sampler draws (a generator seeded with ``seed + epoch``), so
    that a script moved here from transformers sees the same batches.
    """
    if not shuffle:
        return torch.arange(samples)
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


class ShareSampler(Sampler[list[int]]):
    """Batch sampler: the dataset positions that one replica holds, round by round.

    A replica without a share in a ragged last round gets the first sample of the round as a filler, so that all ranks
    run the same number of forward passes; :meth:`is_filler` tells which those are.

    Args:
        plan: the batch arithmetic.
        samples: length of the dataset.
        dp_rank: the replica.
        seed: seed of the order.
        shuffle: False keeps the dataset's order (evaluation).
        order: the order of an epoch, int64 ``[samples]``; default: :func:`epoch_order`.
    """

    def __init__(
        self,
        plan: BatchPlan,
        samples: int,
        dp_rank: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.plan = plan
        self.samples = samples
        self.dp_rank = dp_rank
        self.seed = seed
        self.shuffle = shuffle
        self.order = order
        self.epoch = 0
        self.first_round = 0

    def __len__(self) -> int:
        return self.plan.rounds(self.samples)

    def is_filler(self, round_index: int) -> bool:
        """Whether this replica has no sample of its own in the round."""
        return not self.plan.share(round_index, self.dp_rank, self.samples)

    def __iter__(self) -> Iterator[list[int]]:
        if self.order is None:
            order = epoch_order(self.samples, self.seed, self.epoch, self.shuffle)
        else:
            order = self.order(self.epoch)
        for index in range(self.first_round, len(self)):
            share = self.plan.share(index, self.dp_rank, self.samples)
            first = index * self.plan.round_size
            positions = share or range(first, first + 1)
            yield order[positions.start : positions.stop].tolist()

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
        order: the order of an epoch, int64 ``[samples]``, given its number and the global batch that it is to be made
            for (None: the one it knows); default: :func:`epoch_order`.

    Attributes:
        epoch: whose order is given.
        first_sample: of that order; the rounds of the iteration are counted from there.
        ordered_for: the global batch that the order is made for; None: this plan's.
    """

    def __init__(
        self,
        plan: BatchPlan,
        samples: int,
        dp_rank: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int, int | None], torch.Tensor] | None = None,
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

    def __len__(self) -> int:
        return self.plan.rounds(self.samples)

    @property
    def rest(self) -> int:
        """Samples from the first one on."""
        return max(0, self.samples - self.first_sample)

    def seed_of_round(self, round_index: int) -> int:
        """For what the data draws in a round: it follows from seed, epoch, replica and place in the epoch alone."""
        place = self.first_sample + round_index * self.plan.round_size
        return hash((self.seed, self.epoch, place, self.dp_rank)) % 2**32  # of whole numbers: the same in every process

    def is_filler(self, round_index: int) -> bool:
        """Whether this replica has no sample of its own in the round."""
        return not self.plan.share(round_index, self.dp_rank, self.rest)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order_ahead()
        for index in range(self.plan.rounds(self.rest)):
            yield self._share_in(order, index)

    def share_of(self, round_index: int) -> list[int]:
        """What this replica holds in one round. The order is drawn for it: for a question now and then."""
        return self._share_in(self._order_ahead(), round_index)

    def _order_ahead(self) -> torch.Tensor:
        """Positions in the dataset from the first sample on."""
        if self.order is None:
            order = epoch_order(self.samples, self.seed, self.epoch, self.shuffle)
        else:
            order = self.order(self.epoch, self.ordered_for)
        return order[self.first_sample :]

    def _share_in(self, order: torch.Tensor, index: int) -> Share:
        share = self.plan.share(index, self.dp_rank, self.rest)
        first = index * self.plan.round_size
        positions = share or range(first, first + 1)
        return Share(order[positions.start : positions.stop].tolist(), self.seed_of_round(index))


class Share(list[int]):
    """Positions of a micro-batch, with the seed of what reading it may draw (for loading processes)."""

    def __init__(self, positions: list[int], seed: int) -> None:
        super().__init__(positions)
        self.seed = seed

    def __reduce__(self) -> tuple[type[Share], tuple[list[int], int]]:
        return Share, (list(self), self.seed)

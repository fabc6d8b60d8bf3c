"""The order of samples and each replica's share of it.

The order of an epoch follows from seed and epoch alone (rule 2 of the architecture), and any round can be reached in
constant time, so resuming costs nothing. Positions are looked up for a few rounds at a time
(:mod:`ds_trainer.data.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from ds_trainer.data.order import Order, epoch_order
from ds_trainer.parallel.batch_plan import BatchPlan

_ROUNDS_TOGETHER = 64  # whose positions are looked up at once: looking up one costs about as much


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
        order: the order of an epoch, given its number and the global batch that it is to be made for (None: the one
            it knows); default: :func:`ds_trainer.data.order.epoch_order`.

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
        order: Callable[[int, int | None], Order] | None = None,
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
        self._known: tuple[tuple[int, int | None], Order] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}  # a copy makes its own

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
        rounds = self.plan.rounds(self.rest)
        for first in range(0, rounds, _ROUNDS_TOGETHER):
            yield from self._shares(range(first, min(first + _ROUNDS_TOGETHER, rounds)))

    def share_of(self, round_index: int) -> list[int]:
        """What this replica holds in one round."""
        return next(self._shares(range(round_index, round_index + 1)))

    def positions(self, start: int, stop: int) -> list[int]:
        """Positions in the dataset of the samples ``start`` to ``stop`` of the epoch's order."""
        return self._order().at(np.arange(start, stop)).tolist()

    def _order(self) -> Order:
        asked = (self.epoch, self.ordered_for)
        if self._known is None or self._known[0] != asked:
            if self.order is None:
                order = epoch_order(self.samples, self.seed, self.epoch, self.shuffle)
            else:
                order = self.order(*asked)
            self._known = (asked, order)
        return self._known[1]

    def _shares(self, rounds: range) -> Iterator[Share]:
        places = [self._places(index) for index in rounds]
        found = self._order().at(self.first_sample + np.concatenate([np.arange(p.start, p.stop) for p in places]))
        end = 0
        for index, own in zip(rounds, places, strict=True):
            start, end = end, end + len(own)
            yield Share(found[start:end].tolist(), self.seed_of_round(index))

    def _places(self, index: int) -> range:
        """Of a round, counted from the first sample on."""
        first = index * self.plan.round_size
        return self.plan.share(index, self.dp_rank, self.rest) or range(first, first + 1)


class Share(list[int]):
    """Positions of a micro-batch, with the seed of what reading it may draw (for loading processes)."""

    def __init__(self, positions: list[int], seed: int) -> None:
        super().__init__(positions)
        self.seed = seed

    def __reduce__(self) -> tuple[type[Share], tuple[list[int], int]]:
        return Share, (list(self), self.seed)

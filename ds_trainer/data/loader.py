"""A DataLoader that knows its plan: epochs, any starting round, fillers marked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ds_trainer.data.lengths import SortedShareSampler
from ds_trainer.data.replica import replica_batches, replica_groups
from ds_trainer.data.sampler import Share, ShareSampler


class FillerBatch(dict[str, Any]):
    """A batch that keeps a replica in step with the others in a ragged last round and counts for nothing."""


class PlannedLoader(DataLoader[Any]):
    """Micro-batches of one replica, round by round.

    Where a replica has several ranks, one of them reads and the others receive (:mod:`ds_trainer.data.replica`):
    iterating is collective over them then, once there is a process group.

    Args:
        dataset: map-style dataset.
        sampler: the replica's share.
        collate: makes a batch (a dict) of a list of samples.
        num_workers: loading processes.
        pin_memory: page-locked memory for copies to a GPU.
        worker_options: further keywords of ``DataLoader`` that are about loading processes.

    Attributes:
        during: a context entered with every batch for as long as the reader works on it, so that others can know
            whether it is a filler.
    """

    during: Callable[[Any], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ShareSampler,
        collate: Callable[[list[Any]], Any],
        num_workers: int = 0,
        pin_memory: bool = False,
        **worker_options: Any,
    ) -> None:
        # A generator of our own: the default would draw worker seeds from the global one, and dropout after resuming
        # would differ from the run that was not stopped.
        self._worker_seeds = torch.Generator()
        self._share = sampler
        super().__init__(
            SeededReading(dataset) if num_workers else dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=self._worker_seeds,
            **worker_options,
        )

    @property
    def samples(self) -> int:
        """Samples of the dataset."""
        return self._share.samples

    def places(self, round_index: int) -> np.ndarray | None:
        """Positions in the dataset of the samples of a round, all replicas together; None where they are in order."""
        if not isinstance(self._share, SortedShareSampler):
            return None
        size = self._share.plan.round_size
        return self._share.sorted_positions[round_index * size : (round_index + 1) * size]

    def positions(self, rounds: range) -> list[list[int]]:
        """Positions in the dataset of this replica's micro-batches, of rounds of the iteration under way."""
        return [list(self._share.share_of(index)) for index in rounds]

    def rounds_from(self, first_sample: int) -> int:
        """Rounds of an epoch from its sample ``first_sample`` on."""
        return self._share.plan.rounds(max(0, self.samples - first_sample))

    def start(self, epoch: int, first_sample: int = 0, ordered_for: int | None = None) -> None:
        """Choose what the next iteration gives: the order of ``epoch``, from sample ``first_sample`` on.

        Args:
            epoch: counted from 0.
            first_sample: place in the order of that epoch; the rounds are cut from there on.
            ordered_for: the global batch that the order is made for; default: the plan's.
        """
        self._share.epoch = epoch
        self._share.first_sample = first_sample
        self._share.ordered_for = ordered_for
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator serves as DataLoader's iterator
        groups = replica_groups(self._share.plan.layout)
        return replica_batches(self._read, groups, self.during, self.pin_memory)

    def _read(self) -> Iterator[Any]:
        self._worker_seeds.manual_seed(self._share.seed + self._share.epoch)
        for index, batch in enumerate(super().__iter__()):
            given = FillerBatch(batch) if isinstance(batch, Mapping) and self._share.is_filler(index) else batch
            with self.during(given):
                yield given


class SeededReading(Dataset[Any]):
    """A dataset for loading processes: what it draws follows from the micro-batch, not from what they read before.

    So a run that goes on in the middle of an epoch, with any number of loading processes, reads the same. In the
    training process the random state itself is in the checkpoint.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, share: list[int]) -> list[Any]:
        if isinstance(share, Share):
            random.seed(share.seed)
            np.random.seed(share.seed)
            torch.manual_seed(share.seed)
        together = getattr(self.dataset, "__getitems__", None)
        return list(together(list(share))) if callable(together) else [self.dataset[index] for index in share]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

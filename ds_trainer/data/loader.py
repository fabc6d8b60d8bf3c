"""A DataLoader with a batch plan: epochs, any start position, marked dummy batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ds_trainer.data.batch_structure import as_dummy, counted
from ds_trainer.data.replica import replica_batches, replica_groups
from ds_trainer.data.sampler import DistributedBatchSampler, RankBatch
from ds_trainer.parallel.batch_plan import BatchPlan

if TYPE_CHECKING:
    from ds_trainer.data.sharded_batch import BatchSharder


class PlannedLoader(DataLoader[Any]):
    """The micro-batches of one replica, one per micro-step.

    If a replica has several ranks, one of them reads and the others receive (:mod:`ds_trainer.data.replica`). Iterating
    is then collective over them, once there is a process group.

    Args:
        dataset: map-style dataset.
        sampler: selects the replica's samples.
        collate: returns a batch (a dict) for a list of samples.
        num_workers: data loader workers.
        pin_memory: use page-locked memory for copies to a GPU.
        worker_options: further keywords of ``DataLoader`` for workers.

    Attributes:
        dataset: the object given, also with workers.
        batch_size: samples of a micro-batch on one replica.
        seed: seed of the order.
        batch_sampler: the dataset positions of this replica's micro-batches, a list for each, in the epoch's order.
        sampler: the same positions one by one, without those of dummy batches.
        drop_last: whether samples of an incomplete last micro-step are dropped.
        during: a context manager entered with each batch while it is in use, so that other code can see whether it is a
            dummy.
        sharder: cuts the batches that a replica of several ranks reads; None: each rank gets whole batches.
        pins_shards: whether the shards are put in page-locked memory.
    """

    sharder: BatchSharder | None = None
    pins_shards = False

    during: Callable[[Any], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: DistributedBatchSampler,
        collate: Callable[[list[Any]], Any],
        num_workers: int = 0,
        pin_memory: bool = False,
        **worker_options: Any,
    ) -> None:
        # A separate generator: the default would draw worker seeds from the global one, and dropout after resuming
        # would differ from an uninterrupted run.
        self._worker_seeds = torch.Generator()
        self._batches = sampler
        self.seed = sampler.seed
        options: dict[str, Any] = {
            "batch_sampler": sampler,
            "collate_fn": collate,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "generator": self._worker_seeds,
            **worker_options,
        }
        super().__init__(dataset, **options)
        self._reader = DataLoader(SeededReading(dataset), **options) if num_workers else None
        # torch leaves these empty where there is a batch sampler.
        show_as(self, sampler.plan, sampler=sampler.sampler)

    @property
    def total_batch_size(self) -> int:
        """Samples of a whole micro-step over all replicas: the micro-batch x data-parallel ranks."""
        return self._batches.plan.samples_per_micro_step

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset; as accelerate's loaders, whose attributes these two are."""
        return self.samples

    def cut_with(self, sharder: BatchSharder | None) -> None:
        """Cut the batches of the next iterations for the ranks of a replica; None: give each rank whole ones again."""
        self.sharder = sharder
        pin_what_is_used(self, self._reader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration has; the loop of the Trainer does it itself."""
        self._batches.set_epoch(epoch)

    @property
    def samples(self) -> int:
        """Samples of the dataset."""
        return self._batches.samples

    def result_positions(self, micro_step: int) -> np.ndarray | None:
        """Dataset positions of the samples of a micro-step, over all replicas; None if they are in order."""
        from ds_trainer.data.lengths import SortedBatchSampler

        if not isinstance(self._batches, SortedBatchSampler):
            return None
        size = self._batches.plan.samples_per_micro_step
        return self._batches.sorted_positions[micro_step * size : (micro_step + 1) * size]

    def positions(self, micro_steps: range) -> list[list[int]]:
        """Dataset positions of this replica's micro-batches, for micro-steps of the current iteration."""
        return [list(self._batches.rank_batch_of(index)) for index in micro_steps]

    def micro_steps_from(self, first_sample: int) -> int:
        """Number of micro-steps of an epoch from its sample ``first_sample`` on."""
        return self._batches.plan.micro_steps(max(0, self.samples - first_sample))

    def start(self, epoch: int, first_sample: int = 0, ordered_for: int | None = None, seed: int | None = None) -> None:
        """Set what the next iteration reads: the order of ``epoch``, from sample ``first_sample`` on.

        Args:
            epoch: counted from 0.
            first_sample: index in the order of that epoch; micro-steps are counted from there.
            ordered_for: global batch size for which the order is made; default: the plan's.
            seed: seed of the order; default: :attr:`seed`.
        """
        self._batches.epoch = epoch
        self._batches.seed = self.seed if seed is None else seed
        self._batches.first_sample = first_sample
        self._batches.ordered_for = ordered_for
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator serves as DataLoader's iterator
        groups = replica_groups(self._batches.plan.layout)
        pin = self.pin_memory or self.pins_shards
        return replica_batches(self._read, groups, self.during, pin, sharder=self.sharder)

    def _read(self) -> Iterator[Any]:
        self._worker_seeds.manual_seed(self._batches.seed + self._batches.epoch)
        ragged = self._batches.first_ragged
        batches = super().__iter__() if self._reader is None else iter(as_set(self._reader, self))
        index = 0
        for batch in batches:
            if index >= ragged and self._batches.is_dummy(index):
                batch = as_dummy(batch)
            marked = [batch if isinstance(batch, Mapping) else self._counted(batch, index)]
            index += 1
            if self.sharder is not None:
                del batch
                yield marked.pop()  # nothing here holds the whole batch while its shards are in use
                continue
            with self.during(marked[0]):
                yield marked[0]

    def _counted(self, batch: Any, index: int) -> Any:
        return counted(batch, len(self._batches.rank_batch_of(index)))


def pin_what_is_used(loader: Any, reader: DataLoader[Any] | None) -> None:
    """If ``loader`` cuts, put its shards in page-locked memory, and not the whole batches that ``reader`` reads."""
    pins, cuts = loader.pins_shards or loader.pin_memory, loader.sharder is not None
    loader.pins_shards, loader.pin_memory = pins and cuts, pins and not cuts
    if reader is not None:
        reader.pin_memory = loader.pin_memory


def show_as(loader: DataLoader[Any], plan: BatchPlan, **attributes: Any) -> None:
    """Let the attributes of ``loader`` say what it reads; ``DataLoader`` refuses to set them after its construction."""
    vars(loader).update(batch_size=plan.micro_batch, drop_last=plan.drop_last, **attributes)


def as_set(reader: DataLoader[Any], loader: DataLoader[Any]) -> DataLoader[Any]:
    """``reader``, with what a script may have set on ``loader``, behind which it reads."""
    reader.timeout, reader.worker_init_fn = loader.timeout, loader.worker_init_fn
    if reader.batch_sampler is not None:
        reader.collate_fn = loader.collate_fn
    return reader


class SeededReading(Dataset[Any]):
    """A dataset for data loader workers: its random numbers depend on the micro-batch, not on what was read before.

    So a run that resumes in the middle of an epoch, with any number of workers, reads the same data. In the training
    process the random state itself is in the checkpoint.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, RankBatch):
            random.seed(indices.seed)
            np.random.seed(indices.seed)
            torch.manual_seed(indices.seed)
        getitems = getattr(self.dataset, "__getitems__", None)
        return list(getitems(list(indices))) if callable(getitems) else [self.dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

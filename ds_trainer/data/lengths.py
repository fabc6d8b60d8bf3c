"""Orders and samplers by sample length: less padding, and shorter waits for other ranks.

A global batch is always a run of consecutive samples of an order that depends on seed and epoch alone: runs with
different layouts see the same global batches. The lengths are in memory, 4 bytes per sample on every rank; of the order
of a long dataset only the current chunk is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from ds_trainer.data.columns import has_columns
from ds_trainer.data.order import STORED_UP_TO, ComputedPermutation, Order, Positions, StoredOrder, shuffled
from ds_trainer.data.sampler import DistributedBatchSampler, RankBatch
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils.errors import ConfigError

_GLOBAL_BATCHES_SORTED_TOGETHER = 50
# Attention costs the square of the length; this is its weight relative to the rest of the network, as in transformers.
_SQUARE_WEIGHT = 0.001
_BLOCK = 2**24  # samples whose lengths are compared at once

Lengths = npt.NDArray[np.int32]


def sample_lengths(
    dataset: Any, column: str, model_input: str = "input_ids", asked_by: str = "train_sampling_strategy"
) -> Lengths:
    """Length of every sample: from ``column`` of a table that has it, from a dataset that knows the lengths of its
    ``input_ids``, or else that of ``model_input``.

    ``asked_by`` is the argument that needs the lengths.

    Raises:
        ConfigError: samples have no ``model_input``.
    """
    if has_columns(dataset) and column in dataset.column_names:
        return np.fromiter(map(int, dataset[column]), np.int32, len(dataset))
    known = stored_lengths(dataset) if model_input == "input_ids" else None
    if known is not None:
        return known
    lengths = np.empty(len(dataset), np.int32)
    for index in range(len(dataset)):
        sample = dataset[index]
        if not isinstance(sample, Mapping) or model_input not in sample:
            raise ConfigError(
                f"{asked_by} needs the length of every sample, but sample {index} has no '{model_input}'. Add a column "
                f"'{column}' (length_column_name) to the dataset, or leave {asked_by} at its default."
            )
        lengths[index] = len(sample[model_input])
    return lengths


class _SortedWindows:
    """An order divided into windows, each of which is sorted by length, the longest sample first.

    Args:
        order: the order to divide.
        lengths: lengths of all samples.
        window: samples per window.
        swaps: for the window with the longest sample of all: whether that sample is swapped with the very first one.
    """

    def __init__(
        self,
        order: StoredOrder | ComputedPermutation,
        lengths: Lengths,
        window: int,
        swaps: Callable[[int], bool] = lambda window: True,
    ) -> None:
        self._order, self._lengths, self._size = order, lengths, window
        self._cached: tuple[int, Positions] | None = None
        self._swapped: dict[int, int] = {}  # window -> its first sample
        self.longest = self._window_of_longest()
        if len(self) and swaps(self.longest):
            firsts = [int(self._window(index)[0]) for index in (self.longest, 0)]
            self._swapped = dict(zip((0, self.longest), firsts, strict=True))
            self._cached = None

    def __len__(self) -> int:
        return len(self._order)

    def at(self, indices: Positions) -> Positions:
        """The dataset positions at ``indices``."""
        positions = np.empty_like(indices)
        windows = indices // self._size
        by_window = np.argsort(windows, kind="stable")
        borders = np.flatnonzero(np.diff(windows[by_window])) + 1
        for inside in np.split(by_window, borders) if len(indices) else ():
            index = int(windows[inside[0]])
            positions[inside] = self._window(index)[indices[inside] - index * self._size]
        return positions

    def _window(self, index: int) -> Positions:
        if self._cached is None or self._cached[0] != index:
            start = index * self._size
            samples = self._order.at(np.arange(start, min(start + self._size, len(self))))
            samples = samples[np.argsort(-self._lengths[samples].astype(np.int64), kind="stable")]
            samples[0] = self._swapped.get(index, samples[0])
            self._cached = (index, samples)
        return self._cached[1]

    def _window_of_longest(self) -> int:
        """The window with the longest sample of all; the first one, if there are several."""
        if not len(self):
            return 0
        longest = self._lengths.max()
        if self._lengths[self._window(0)[0]] == longest:
            return 0
        blocks = range(0, len(self), _BLOCK)
        longests = [start + np.flatnonzero(self._lengths[start : start + _BLOCK] == longest) for start in blocks]
        return int(self._order.indices_of(np.concatenate(longests)).min()) // self._size


class OrderByLength(ABC):
    """Base of the orders in which the samples of a global batch have about the same length.

    Args:
        lengths: lengths of all samples.
        global_batch_size: default of :meth:`__call__`.
        seed: default of :meth:`__call__`.
    """

    def __init__(self, lengths: npt.ArrayLike, global_batch_size: int, seed: int) -> None:
        self.lengths = _as_lengths(lengths)
        self.global_batch_size = global_batch_size
        self.seed = seed

    def __call__(self, epoch: int, global_batch_size: int | None = None, seed: int | None = None) -> Order:
        """The order of ``epoch`` for global batches of ``global_batch_size``, drawn with ``seed``."""
        drawn_with = self.seed if seed is None else seed
        order = self._order(epoch, global_batch_size or self.global_batch_size, drawn_with)
        # A short order is stored, so that every window is sorted only once.
        return StoredOrder(order.at(np.arange(len(order)))) if len(order) <= STORED_UP_TO else order

    @abstractmethod
    def _order(self, epoch: int, global_batch_size: int, seed: int) -> Order:
        """The order, as it is computed."""


class RoughlySorted(OrderByLength):
    """Global batches of about equal length, in random order.

    Samples are shuffled and divided into chunks of 50 global batches; each chunk is sorted by length and divided into
    batches. The batch with the longest sample comes first, so that an out-of-memory error shows at once; the others
    are shuffled, with the incomplete one at the end. As the ``SortishSampler`` of transformers' early
    ``Seq2SeqTrainer`` (after fastai's), except that batches are global and the order depends on seed and epoch alone.
    """

    def _order(self, epoch: int, global_batch_size: int, seed: int) -> Order:
        return _ShuffledBatches(self.lengths, global_batch_size, seed, epoch)


class _ShuffledBatches:
    """See :class:`RoughlySorted`."""

    def __init__(self, lengths: Lengths, global_batch_size: int, seed: int, epoch: int) -> None:
        self._batch_size, window = global_batch_size, global_batch_size * _GLOBAL_BATCHES_SORTED_TOGETHER
        batches = len(lengths) // global_batch_size
        self._whole = batches * global_batch_size
        # The incomplete batch stays at the end; if the longest sample is in it, that sample moves.
        order = shuffled(len(lengths), seed, epoch)
        self._sorted = _SortedWindows(order, lengths, window, lambda index: 0 < self._whole == index * window)
        longest = self._sorted.longest * _GLOBAL_BATCHES_SORTED_TOGETHER
        self._leading = longest if longest < batches else 0
        self._others = shuffled(max(0, batches - 1), seed, epoch)

    def __len__(self) -> int:
        return len(self._sorted)

    def at(self, indices: Positions) -> Positions:
        """The dataset positions at ``indices``."""
        batches, inside = np.divmod(indices, self._batch_size)
        later = (batches > 0) & (indices < self._whole)
        others = self._others.at(batches[later] - 1)
        batches[(batches == 0) & (indices < self._whole)] = self._leading
        batches[later] = others + (others >= self._leading)
        return self._sorted.at(batches * self._batch_size + inside)


class GroupedByLength(OrderByLength):
    """Global batches of about equal length.

    Samples are shuffled and divided into chunks of up to 50 global batches; each chunk is sorted by length, longest
    first. The longest sample of all comes first, so that an out-of-memory error shows at once. As transformers'
    ``LengthGroupedSampler``, except that chunks are multiples of the global batch, not of one rank's part of it.
    """

    def _order(self, epoch: int, global_batch_size: int, seed: int) -> Order:
        samples = len(self.lengths)
        batches = max(1, min(samples // (global_batch_size * 4), _GLOBAL_BATCHES_SORTED_TOGETHER))
        return _SortedWindows(shuffled(samples, seed, epoch), self.lengths, batches * global_batch_size)


def _as_lengths(lengths: npt.ArrayLike) -> Lengths:
    return np.asarray(lengths, np.int32)


class SortedBatchSampler(DistributedBatchSampler):
    """The batches of a replica in an order sorted by length, longest first: for evaluation, whose order is free.

    This order has the least padding, and an out-of-memory error shows at once.

    Args:
        plan: the batch arithmetic.
        lengths: lengths of all samples.
        dp_rank: index of the replica.

    Attributes:
        sorted_positions: dataset positions of the samples in this order, int64 ``[samples]``; used to restore the
            dataset's order in results.
    """

    def __init__(self, plan: BatchPlan, lengths: npt.ArrayLike, dp_rank: int) -> None:
        known = _as_lengths(lengths)
        super().__init__(plan, len(known), dp_rank, shuffle=False)
        self.sorted_positions: Positions = np.argsort(-known.astype(np.int64), kind="stable")

    def _order(self) -> Order:
        return StoredOrder(self.sorted_positions)


def balanced_groups(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Divide the indices of ``lengths`` into ``groups`` groups with the smallest possible maximum cost.

    The cost of a group is that of its padded micro-batch: samples times longest, plus attention. Groups are runs of the
    samples sorted by length, so that there is little padding. If there are fewer samples than groups, some are empty.

    Returns:
        The groups, the most expensive one first.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))

    def packed(limit: float) -> list[list[int]]:
        runs: list[list[int]] = []
        for position in order:
            if runs and _cost(len(runs[-1]) + 1, lengths[runs[-1][0]]) <= limit:
                runs[-1].append(position)
            else:
                runs.append([position])
        return runs

    if not order:
        return [[] for _ in range(groups)]
    longest = lengths[order[0]]
    low, high = 0.0, _cost(len(order), longest)
    while high - low > 1e-3 * max(1.0, _cost(1, longest)):
        middle = (low + high) / 2
        low, high = (low, middle) if len(packed(middle)) <= groups else (middle, high)
    runs = packed(high)
    while len(runs) < groups and any(len(run) > 1 for run in runs):  # no replica is idle while another has two samples
        largest = max(runs, key=lambda run: _cost(len(run), lengths[run[0]]) if len(run) > 1 else -1.0)
        runs.append(largest[len(largest) // 2 :])
        del largest[len(largest) // 2 :]
    runs += [[] for _ in range(groups - len(runs))]
    return sorted(runs, key=lambda run: -_cost(len(run), lengths[run[0]]) if run else 0.0)


def _cost(samples: int, longest: int) -> float:
    return samples * longest * (1 + _SQUARE_WEIGHT * longest)


class BalancedBatchSampler(DistributedBatchSampler):
    """The batches of a replica, such that the micro-batches of a step cost about the same on all replicas.

    A global batch has the samples of the random order; only their distribution differs: a micro-batch has a few long
    samples or many short ones. (transformers' ``batch_rebalance``.)

    Args:
        plan: the batch arithmetic.
        lengths: lengths of all samples.
        dp_rank: index of the replica.
        seed: seed of the order.
    """

    def __init__(self, plan: BatchPlan, lengths: npt.ArrayLike, dp_rank: int, seed: int = 0) -> None:
        self.lengths = _as_lengths(lengths)
        super().__init__(plan, len(self.lengths), dp_rank, seed, shuffle=True)
        self._cached_step: tuple[tuple[int, ...], list[list[int]]] | None = None

    def is_dummy(self, micro_step: int) -> bool:
        """Whether this replica has no samples in the micro-step."""
        return micro_step >= self.first_ragged and not self._samples(micro_step)

    @property
    def replica_samples(self) -> int:
        """Samples of this replica in the iteration: every micro-batch has its own number."""
        return sum(len(self._samples(index)) for index in range(self.plan.micro_steps(self.rest)))

    @property
    def first_ragged(self) -> int:
        """The first micro-step in which a replica may have no samples."""
        whole_steps = self.plan.samples_used(self.rest) // self.plan.global_batch_size
        return whole_steps * self.plan.accumulation

    def rank_batches(self, micro_steps: range) -> list[RankBatch]:
        """The batches of this replica in some micro-steps."""
        batches = []
        for index, seed in zip(micro_steps, self.seeds(micro_steps), strict=True):
            first_of_step = self._step(index // self.plan.accumulation)[0][:1]
            batches.append(RankBatch(self._samples(index) or first_of_step, seed))
        return batches

    def _samples(self, micro_step: int) -> list[int]:
        step, slot = divmod(micro_step, self.plan.accumulation)
        return self._step(step)[slot * self.plan.layout.dp + self.dp_rank]

    def _step(self, step: int) -> list[list[int]]:
        key = (self.seed, self.epoch, self.first_sample, step)
        if self._cached_step is None or self._cached_step[0] != key:
            start = self.first_sample + step * self.plan.global_batch_size
            end = min(start + self.plan.global_batch_size, self.first_sample + self.plan.samples_used(self.rest))
            samples = self.positions(start, end)
            micro_steps = math.ceil(len(samples) / self.plan.samples_per_micro_step)
            groups = balanced_groups(self.lengths[samples].tolist(), micro_steps * self.plan.layout.dp)
            self._cached_step = (key, [[samples[position] for position in group] for group in groups])
        return self._cached_step[1]


def stored_lengths(dataset: Any) -> npt.NDArray[np.int32] | None:
    """Tokens of every sample, int32 ``[samples]``; None if the dataset does not know them.

    A dataset knows them if its attribute ``lengths`` is an array with one integer per sample, as that of a
    :class:`~ds_trainer.samples.prepared.dataset.PreparedDataset`. Subsets and concatenations of such datasets know them
    too, with a copy of four bytes per sample.
    """
    if isinstance(dataset, Subset):
        whole = stored_lengths(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        each = [stored_lengths(part) for part in dataset.datasets]
        known = [lengths for lengths in each if lengths is not None]
        return np.concatenate(known) if len(known) == len(each) else None
    lengths = getattr(dataset, "lengths", None)
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "iu" or lengths.shape != (len(dataset),):
        return None
    return lengths.astype(np.int32, copy=False)

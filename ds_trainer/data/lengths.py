"""Orders and shares that look at the lengths of samples, so that little is padded and no rank waits long.

Both keep the rule that a global batch is a run of consecutive samples of an order that follows from seed and epoch
alone: runs with different layouts see the same global batches. The lengths themselves lie in memory, 4 bytes a sample
on every rank; of an order of many samples only the chunk that is sorted does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_trainer.data.columns import has_columns
from ds_trainer.data.order import STORED_UP_TO, ComputedPermutation, Order, Places, StoredOrder, shuffled
from ds_trainer.data.sampler import Share, ShareSampler
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils.errors import ConfigError

_GLOBAL_BATCHES_SORTED_TOGETHER = 50
# Attention costs the square of the length; this is its weight beside the rest of the network (transformers' value).
_SQUARE_WEIGHT = 0.001
_BLOCK = 2**24  # samples whose lengths are looked at together

Lengths = npt.NDArray[np.int32]


def sample_lengths(
    dataset: Any, column: str, model_input: str = "input_ids", asked_by: str = "train_sampling_strategy"
) -> Lengths:
    """Length of every sample: from ``column`` of a table that has it, else by looking at ``model_input`` of each.

    ``asked_by`` is the argument that wants to know.

    Raises:
        ConfigError: samples have no ``model_input``.
    """
    if has_columns(dataset) and column in dataset.column_names:
        return np.fromiter(map(int, dataset[column]), np.int32, len(dataset))
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
    """An order cut into windows, each of which is sorted by length, the longest first.

    Args:
        order: what is cut.
        lengths: of all samples.
        window: places of a window.
        swaps: given the window with the longest sample of all, whether that sample trades places with the first one.
    """

    def __init__(
        self,
        order: StoredOrder | ComputedPermutation,
        lengths: Lengths,
        window: int,
        swaps: Callable[[int], bool] = lambda window: True,
    ) -> None:
        self._order, self._lengths, self._size = order, lengths, window
        self._known: tuple[int, Places] | None = None
        self._traded: dict[int, int] = {}  # window -> sample at its first place
        self.longest = self._window_of_longest()
        if len(self) and swaps(self.longest):
            firsts = [int(self._window(index)[0]) for index in (self.longest, 0)]
            self._traded = dict(zip((0, self.longest), firsts, strict=True))
            self._known = None

    def __len__(self) -> int:
        return len(self._order)

    def at(self, places: Places) -> Places:
        """The positions at ``places``."""
        found = np.empty_like(places)
        windows = places // self._size
        for index in np.unique(windows).tolist():
            inside = windows == index
            found[inside] = self._window(index)[places[inside] - index * self._size]
        return found

    def _window(self, index: int) -> Places:
        if self._known is None or self._known[0] != index:
            start = index * self._size
            samples = self._order.at(np.arange(start, min(start + self._size, len(self))))
            samples = samples[np.argsort(-self._lengths[samples].astype(np.int64), kind="stable")]
            samples[0] = self._traded.get(index, samples[0])
            self._known = (index, samples)
        return self._known[1]

    def _window_of_longest(self) -> int:
        """The window with the longest sample of all; the first one, if there are several."""
        if not len(self):
            return 0
        longest = self._lengths.max()
        if self._lengths[self._window(0)[0]] == longest:
            return 0
        blocks = range(0, len(self), _BLOCK)
        longests = [start + np.flatnonzero(self._lengths[start : start + _BLOCK] == longest) for start in blocks]
        return int(self._order.where(np.concatenate(longests)).min()) // self._size


class RoughlySorted:
    """An order in which the samples of a global batch have about the same length, and the batches come at random.

    Samples are shuffled, cut into chunks of 50 global batches, each sorted by length, and cut into batches. The batch
    with the longest sample comes first, so that memory runs out at once if ever; the others are shuffled, the ragged
    one at the end. As the ``SortishSampler`` of transformers' early ``Seq2SeqTrainer`` (after fastai's), except that
    batches are global ones, and that the order follows from seed and epoch.

    Args:
        lengths: of all samples.
        step_size: samples of a global batch.
        seed: seed of the order.
    """

    def __init__(self, lengths: npt.ArrayLike, step_size: int, seed: int) -> None:
        self.lengths = _as_lengths(lengths)
        self.step_size = step_size
        self.seed = seed

    def __call__(self, epoch: int, step_size: int | None = None) -> Order:
        """The order of ``epoch`` for global batches of ``step_size``."""
        return _stored_if_short(_BatchesAtRandom(self.lengths, step_size or self.step_size, self.seed, epoch))


class _BatchesAtRandom:
    """See :class:`RoughlySorted`."""

    def __init__(self, lengths: Lengths, step_size: int, seed: int, epoch: int) -> None:
        self._step_size, window = step_size, step_size * _GLOBAL_BATCHES_SORTED_TOGETHER
        batches = len(lengths) // step_size
        self._whole = batches * step_size
        # In the ragged batch, which stays where it is, the longest sample moves.
        order = shuffled(len(lengths), seed, epoch)
        self._sorted = _SortedWindows(order, lengths, window, lambda index: 0 < self._whole == index * window)
        longest = self._sorted.longest * _GLOBAL_BATCHES_SORTED_TOGETHER
        self._leading = longest if longest < batches else 0
        self._others = shuffled(max(0, batches - 1), seed, epoch)

    def __len__(self) -> int:
        return len(self._sorted)

    def at(self, places: Places) -> Places:
        """The positions at ``places``."""
        batches, inside = np.divmod(places, self._step_size)
        later = (batches > 0) & (places < self._whole)
        others = self._others.at(batches[later] - 1)
        batches[(batches == 0) & (places < self._whole)] = self._leading
        batches[later] = others + (others >= self._leading)
        return self._sorted.at(batches * self._step_size + inside)


class GroupedByLength:
    """An order in which the samples of a global batch have about the same length.

    Samples are shuffled and cut into chunks of up to 50 global batches; each chunk is sorted by length, longest first.
    The longest sample of all comes first, so that memory runs out at once if ever. As transformers'
    ``LengthGroupedSampler``, except that chunks are multiples of the global batch, not of one rank's part of it.

    Args:
        lengths: of all samples.
        step_size: samples of a global batch.
        seed: seed of the order.
    """

    def __init__(self, lengths: npt.ArrayLike, step_size: int, seed: int) -> None:
        self.lengths = _as_lengths(lengths)
        self.step_size = step_size
        self.seed = seed

    def __call__(self, epoch: int, step_size: int | None = None) -> Order:
        """The order of ``epoch`` for global batches of ``step_size``."""
        step_size, samples = step_size or self.step_size, len(self.lengths)
        batches = max(1, min(samples // (step_size * 4), _GLOBAL_BATCHES_SORTED_TOGETHER))
        order = shuffled(samples, self.seed, epoch)
        return _stored_if_short(_SortedWindows(order, self.lengths, batches * step_size))


def _as_lengths(lengths: npt.ArrayLike) -> Lengths:
    return np.asarray(lengths, np.int32)


def _stored_if_short(order: Order) -> Order:
    """``order``, in memory where that is small: every window is sorted once then."""
    return StoredOrder(order.at(np.arange(len(order)))) if len(order) <= STORED_UP_TO else order


class SortedShareSampler(ShareSampler):
    """Shares of a dataset in the order of its lengths, the longest first: for evaluation, where order is free.

    Batches of about equal lengths have the least padding there can be; memory runs out at once if ever.

    Args:
        plan: the batch arithmetic.
        lengths: of all samples.
        dp_rank: the replica.

    Attributes:
        sorted_positions: of the samples in the dataset, int64 ``[samples]``: who puts results back in order needs them.
    """

    def __init__(self, plan: BatchPlan, lengths: npt.ArrayLike, dp_rank: int) -> None:
        known = _as_lengths(lengths)
        super().__init__(plan, len(known), dp_rank, shuffle=False)
        self.sorted_positions: Places = np.argsort(-known.astype(np.int64), kind="stable")

    def _order(self) -> Order:
        return StoredOrder(self.sorted_positions)


def balanced_groups(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Positions of ``lengths`` in ``groups`` groups whose dearest is as cheap as possible, the dearest first.

    A group costs what its padded micro-batch does: samples times longest, plus attention. Groups are runs of the
    samples sorted by length, so that little is padded. Where there are fewer samples than groups, some are empty.
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
    while len(runs) < groups and any(len(run) > 1 for run in runs):  # nobody idle while others have two
        largest = max(runs, key=lambda run: _cost(len(run), lengths[run[0]]) if len(run) > 1 else -1.0)
        runs.append(largest[len(largest) // 2 :])
        del largest[len(largest) // 2 :]
    runs += [[] for _ in range(groups - len(runs))]
    return sorted(runs, key=lambda run: -_cost(len(run), lengths[run[0]]) if run else 0.0)


def _cost(samples: int, longest: int) -> float:
    return samples * longest * (1 + _SQUARE_WEIGHT * longest)


class BalancedShareSampler(ShareSampler):
    """Shares of a random order in which the micro-batches of a step cost about the same on all replicas.

    The samples of a global batch are those of the random order; only their dealing differs: micro-batches have
    different numbers of samples, few long ones or many short ones. (transformers' ``batch_rebalance``.)

    Args:
        plan: the batch arithmetic.
        lengths: of all samples.
        dp_rank: the replica.
        seed: seed of the order.
    """

    def __init__(self, plan: BatchPlan, lengths: npt.ArrayLike, dp_rank: int, seed: int = 0) -> None:
        self.lengths = _as_lengths(lengths)
        super().__init__(plan, len(self.lengths), dp_rank, seed, shuffle=True)
        self._dealt_last: tuple[tuple[int, int, int], list[list[int]]] | None = None

    def is_filler(self, round_index: int) -> bool:
        """Whether this replica has no sample of its own in the round."""
        whole_steps = self.plan.samples_used(self.rest) // self.plan.step_size
        return round_index // self.plan.accumulation >= whole_steps and not self._own(round_index)

    def _shares(self, rounds: range) -> Iterator[Share]:
        for index in rounds:
            first_of_step = self._step(index // self.plan.accumulation)[0][:1]
            yield Share(self._own(index) or first_of_step, self.seed_of_round(index))

    def _own(self, round_index: int) -> list[int]:
        step, slot = divmod(round_index, self.plan.accumulation)
        return self._step(step)[slot * self.plan.layout.dp + self.dp_rank]

    def _step(self, step: int) -> list[list[int]]:
        asked = (self.epoch, self.first_sample, step)
        if self._dealt_last is None or self._dealt_last[0] != asked:
            self._dealt_last = (asked, self._dealt(step))
        return self._dealt_last[1]

    def _dealt(self, step: int) -> list[list[int]]:
        start = self.first_sample + step * self.plan.step_size
        end = min(start + self.plan.step_size, self.first_sample + self.plan.samples_used(self.rest))
        samples = self.positions(start, end)
        rounds = math.ceil(len(samples) / self.plan.round_size)
        groups = balanced_groups(self.lengths[samples].tolist(), rounds * self.plan.layout.dp)
        return [[samples[position] for position in group] for group in groups]

"""Orders and shares that look at the lengths of samples, so that little is padded and no rank waits long.

Both keep the rule that a global batch is a run of consecutive samples of an order that follows from seed and epoch
alone: runs with different layouts see the same global batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ds_trainer.data.columns import has_columns
from ds_trainer.data.sampler import Share, ShareSampler, epoch_order
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils.errors import ConfigError

_GLOBAL_BATCHES_SORTED_TOGETHER = 50
# Attention costs the square of the length; this is its weight beside the rest of the network (transformers' value).
_SQUARE_WEIGHT = 0.001


def sample_lengths(
    dataset: Any, column: str, model_input: str = "input_ids", asked_by: str = "train_sampling_strategy"
) -> list[int]:
    """Length of every sample: from ``column`` of a table that has it, else by looking at ``model_input`` of each.

    ``asked_by`` is the argument that wants to know.

    Raises:
        ConfigError: samples have no ``model_input``.
    """
    if has_columns(dataset) and column in dataset.column_names:
        return [int(length) for length in dataset[column]]
    lengths = []
    for index in range(len(dataset)):
        sample = dataset[index]
        if not isinstance(sample, Mapping) or model_input not in sample:
            raise ConfigError(
                f"{asked_by} needs the length of every sample, but sample {index} has no '{model_input}'. Add a column "
                f"'{column}' (length_column_name) to the dataset, or leave {asked_by} at its default."
            )
        lengths.append(len(sample[model_input]))
    return lengths


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

    def __init__(self, lengths: Sequence[int], step_size: int, seed: int) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.step_size = step_size
        self.seed = seed

    def __call__(self, epoch: int, step_size: int | None = None) -> torch.Tensor:
        """The order of ``epoch`` for global batches of ``step_size``: int64 ``[samples]``."""
        step_size = step_size or self.step_size
        shuffled = epoch_order(len(self.lengths), self.seed, epoch, shuffle=True)
        chunks = shuffled.split(step_size * _GLOBAL_BATCHES_SORTED_TOGETHER)
        order = torch.cat([chunk[self.lengths[chunk].argsort(descending=True, stable=True)] for chunk in chunks])
        longest = int(self.lengths[order].argmax())
        first = longest - longest % step_size
        whole = len(order) - len(order) % step_size
        if first == whole and whole:  # in the ragged batch, which stays where it is: its longest sample moves
            order[[0, longest]] = order[[longest, 0]]
            first = 0
        batches = list(order[:whole].split(step_size)) if whole else []
        leading = batches.pop(first // step_size) if batches else order[:0]
        places = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        return torch.cat([leading, *(batches[place] for place in places), order[whole:]])


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

    def __init__(self, lengths: Sequence[int], step_size: int, seed: int) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.step_size = step_size
        self.seed = seed

    def __call__(self, epoch: int, step_size: int | None = None) -> torch.Tensor:
        """The order of ``epoch`` for global batches of ``step_size``: int64 ``[samples]``."""
        step_size = step_size or self.step_size
        batches = max(1, min(len(self.lengths) // (step_size * 4), _GLOBAL_BATCHES_SORTED_TOGETHER))
        shuffled = epoch_order(len(self.lengths), self.seed, epoch, shuffle=True)
        chunks = [
            chunk[self.lengths[chunk].argsort(descending=True, stable=True)]
            for chunk in shuffled.split(batches * step_size)
        ]
        longest = max(range(len(chunks)), key=lambda index: int(self.lengths[chunks[index][0]]))
        first = chunks[0][0].clone()
        chunks[0][0] = chunks[longest][0]
        chunks[longest][0] = first
        return torch.cat(chunks)


class SortedShareSampler(ShareSampler):
    """Shares of a dataset in the order of its lengths, the longest first: for evaluation, where order is free.

    Batches of about equal lengths have the least padding there can be; memory runs out at once if ever.

    Args:
        plan: the batch arithmetic.
        lengths: of all samples.
        dp_rank: the replica.

    Attributes:
        positions: of the samples in the dataset, int64 ``[samples]``: who puts results back in order needs them.
    """

    def __init__(self, plan: BatchPlan, lengths: Sequence[int], dp_rank: int) -> None:
        order = torch.as_tensor(lengths).argsort(descending=True, stable=True)
        super().__init__(plan, len(lengths), dp_rank, shuffle=False, order=lambda epoch, step_size: order)
        self.positions: np.ndarray = order.numpy()


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

    def __init__(self, plan: BatchPlan, lengths: Sequence[int], dp_rank: int, seed: int = 0) -> None:
        super().__init__(plan, len(lengths), dp_rank, seed, shuffle=True)
        self.lengths = list(lengths)
        self._step = functools.lru_cache(maxsize=2)(self._dealt)

    def is_filler(self, round_index: int) -> bool:
        """Whether this replica has no sample of its own in the round."""
        return not self._own(round_index)

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(self.plan.rounds(self.rest)):
            yield Share(self.share_of(index), self.seed_of_round(index))

    def share_of(self, round_index: int) -> list[int]:
        """What this replica holds in one round."""
        step = round_index // self.plan.accumulation
        return self._own(round_index) or self._step(self.epoch, self.first_sample, step)[0][:1]

    def _own(self, round_index: int) -> list[int]:
        step, slot = divmod(round_index, self.plan.accumulation)
        return self._step(self.epoch, self.first_sample, step)[slot * self.plan.layout.dp + self.dp_rank]

    def _dealt(self, epoch: int, first_sample: int, step: int) -> list[list[int]]:
        start = first_sample + step * self.plan.step_size
        end = min(start + self.plan.step_size, first_sample + self.plan.samples_used(self.samples - first_sample))
        samples = self._order(epoch)[start:end].tolist()
        rounds = math.ceil(len(samples) / self.plan.round_size)
        groups = balanced_groups([self.lengths[sample] for sample in samples], rounds * self.plan.layout.dp)
        return [[samples[position] for position in group] for group in groups]

    def _order(self, epoch: int) -> torch.Tensor:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, epoch_order(self.samples, self.seed, epoch, self.shuffle))
        return self._kept[1]

    _kept: tuple[int, torch.Tensor] | None = None

"""Orders and balancing by length: no sample lost or repeated, the same global batches for every layout."""

from __future__ import annotations

import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_trainer import ConfigError, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from ds_trainer.data.lengths import (
    BalancedBatchSampler,
    GroupedByLength,
    RoughlySorted,
    balanced_groups,
    sample_lengths,
)
from ds_trainer.data.order import epoch_order
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.batches import Sampling
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import train_plainly
from tests.support.orders import chunks, in_full
from tests.support.pool import pool
from tests.support.runs import train_and_report

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def padding(batches: list[list[int]], lengths: list[int]) -> int:
    return sum(max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in batches)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 3))
def test_grouping_is_a_permutation_with_the_longest_first(lengths: list[int], step: int, epoch: int) -> None:
    order = in_full(GroupedByLength(lengths, step, seed=4)(epoch))
    assert sorted(order) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)
    assert order == in_full(GroupedByLength(lengths, step, seed=4)(epoch))


def test_grouping_is_that_of_transformers_in_one_process() -> None:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()
    reference = get_length_grouped_indices(lengths, 8, generator=torch.Generator().manual_seed(7 + 2))
    assert in_full(GroupedByLength(lengths, 8, seed=7)(2)) == reference


def test_an_order_by_length_can_be_looked_up_in_any_sequence() -> None:
    lengths = torch.randint(1, 50, (1000,), generator=torch.Generator().manual_seed(3)).numpy()
    order = GroupedByLength(lengths, 4, seed=1)._order(0, 4, 1)  # as for a long dataset: computed window by window
    whole = order.at(np.arange(1000))
    mixed = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(order.at(mixed), whole[mixed])
    assert order.at(mixed[:0]).tolist() == []


def test_a_long_stored_order_takes_time_in_proportion_to_its_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 2**19)
    order = GroupedByLength(lengths, 1, seed=1)
    began = time.process_time()
    assert len(order(0)) == 2**19
    assert time.process_time() - began < 1.5  # comparing every window with every position took ten times as long


def test_grouping_saves_padding() -> None:
    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    wasted = {}
    for name, order in (("grouped", GroupedByLength(lengths, 16, 0)(0)), ("random", epoch_order(1000, 0, 0, True))):
        wasted[name] = padding(chunks(order, 16), lengths)
    assert wasted["grouped"] < 0.1 * wasted["random"]


@given(LENGTHS, st.integers(1, 9), st.integers(0, 3))
def test_a_roughly_sorted_order_is_a_permutation_that_begins_with_the_longest(
    lengths: list[int], step: int, epoch: int
) -> None:
    order = in_full(RoughlySorted(lengths, step, seed=4)(epoch))
    assert sorted(order) == list(range(len(lengths)))
    assert max(lengths[i] for i in order[:step]) == max(lengths)
    assert order == in_full(RoughlySorted(lengths, step, seed=4)(epoch))


def test_a_roughly_sorted_order_saves_padding_but_is_not_sorted() -> None:
    lengths = torch.randint(1, 500, (1003,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = chunks(RoughlySorted(lengths, 16, 0)(0), 16)
    random = chunks(epoch_order(1003, 0, 0, True), 16)
    assert padding(batches, lengths) < 0.1 * padding(random, lengths)
    longest = [max(lengths[i] for i in batch) for batch in batches]
    rising = sum(a < b for a, b in pairwise(longest))
    assert 20 < rising < 43  # about half of the 62: the batches come at random
    assert in_full(RoughlySorted(lengths, 16, 0)(1)) != in_full(RoughlySorted(lengths, 16, 0)(0))


def test_the_sortish_sampler_of_a_trainer(tmp_path: Path) -> None:
    """Global batches are the same for one rank and for two, and again after a start in the middle."""
    lengths = torch.randint(1, 30, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": [i + 1] * length, "labels": [1]} for i, length in enumerate(lengths)]
    batches: dict[int, list[list[int]]] = {}
    for world in (1, 2):
        plan = BatchPlan(ParallelLayout(world), 4 // world)
        args = Seq2SeqTrainingArguments(str(tmp_path), sortish_sampler=True, use_cpu=True)
        samplers = [Sampling(args, rows).sampler(plan, len(rows), rank) for rank in range(world)]
        batches[world] = [list(chain(*shards)) for shards in zip(*samplers, strict=True)]
        for sampler in samplers:
            sampler.first_sample = 8  # two global batches
        assert [list(chain(*shards)) for shards in zip(*samplers, strict=True)] == batches[world][2:]
    assert batches[1][:5] == batches[2][:5] and sorted(batches[1][5]) == sorted(set(batches[2][5]))
    assert batches[1][:5] == chunks(RoughlySorted(lengths, 4, 42)(0), 4)[:5]
    with pytest.raises(ConfigError, match="sortish_sampler needs the length of every sample"):
        Sampling(args, [{"x": 1}])


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_balanced_groups_hold_every_sample_once(lengths: list[int], groups: int) -> None:
    found = balanced_groups(lengths, groups)
    assert len(found) == groups
    assert sorted(position for group in found for position in group) == list(range(len(lengths)))
    assert sum(map(bool, found)) == min(groups, len(lengths))


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 4))
def test_the_most_expensive_group_is_as_cheap_as_possible(lengths: list[int], groups: int) -> None:
    """Compared with all ways to divide the sorted samples."""
    from itertools import combinations

    def cost(run: list[int]) -> float:
        return len(run) * max(run) * (1 + 0.001 * max(run)) if run else 0.0

    ordered = sorted(lengths, reverse=True)
    best = min(
        max(cost(ordered[a:b]) for a, b in zip((0, *boundaries), (*boundaries, len(ordered)), strict=True))
        for count in range(min(groups, len(ordered)))
        for boundaries in combinations(range(1, len(ordered)), count)
    )
    found = max(cost([lengths[position] for position in group]) for group in balanced_groups(lengths, groups))
    assert found <= best * 1.01 + 0.2


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_balancing_over_ranks_keeps_the_global_batches(
    lengths: list[int], dp: int, micro: int, accumulation: int, drop_last: bool
) -> None:
    plan = BatchPlan(ParallelLayout(dp), micro, accumulation, drop_last)
    order = in_full(epoch_order(len(lengths), 5, 2, True))
    steps: dict[int, list[int]] = {}
    for rank in range(dp):
        sampler = BalancedBatchSampler(plan, lengths, rank, seed=5)
        sampler.epoch = 2
        batches = list(sampler)
        assert len(batches) == plan.micro_steps(len(lengths)) and all(batches)
        for index, batch in enumerate(batches):
            if not sampler.is_dummy(index):
                steps.setdefault(index // accumulation, []).extend(batch)
        sampler.first_sample = plan.global_batch_size
        assert list(sampler) == batches[accumulation:]
    used = plan.samples_used(len(lengths))
    wanted = [
        sorted(order[start : min(start + plan.global_batch_size, used)])
        for start in range(0, used, plan.global_batch_size)
    ]
    assert [sorted(steps[step]) for step in sorted(steps)] == wanted


def test_lengths_come_from_the_column_or_from_the_samples() -> None:
    import datasets

    rows = [{"input_ids": [1] * n, "long": 10 * n} for n in (3, 1, 2)]
    assert sample_lengths(rows, "long").tolist() == [3, 1, 2]
    assert sample_lengths(datasets.Dataset.from_list(rows), "long").tolist() == [30, 10, 20]
    assert sample_lengths(datasets.Dataset.from_list(rows), "length").tolist() == [3, 1, 2]
    with pytest.raises(ConfigError, match=r"sample 0 has no 'input_ids'.*length_column_name"):
        sample_lengths([{"x": 1}], "length")


class Varied(RaggedTokens):
    """Samples of different true lengths, of which a collator makes batches."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        used = int(row["attention_mask"].sum())
        return {name: value[:used] for name, value in row.items()}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    sequences = torch.nn.utils.rnn.pad_sequence
    return {n: sequences([r[n] for r in rows], batch_first=True, padding_value=v) for n, v in fill.items()}


class Padded(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, data_collator=pad, **kwargs)


def train_varied(output_dir: str, **values: Any) -> Any:
    return train_and_report(tiny_llama, lambda: Varied(37), output_dir, Padded, **values)


def layout(world: int, accumulation: int) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": 16 // world // accumulation, "gradient_accumulation_steps": accumulation}
    return {**sizes, "learning_rate": 2e-3, "max_grad_norm": 0.0}


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 2), (4, 2)])
def test_rebalanced_batches_train_like_plain_pytorch(world: int, accumulation: int, tmp_path: Path) -> None:
    """The samples of every step are those of the random order, so the numbers are the oracle's."""
    wanted = train_plainly(tiny_llama(), RaggedTokens(37), learning_rate=2e-3)
    values = {**layout(world, accumulation), "train_sampling_strategy": "batch_rebalance"}
    for found in pool(world).run(rebalanced, str(tmp_path), values):
        assert_equal(found, wanted)


def rebalanced(output_dir: str, values: dict[str, Any]) -> Any:
    return train_varied(output_dir, **values)


def test_grouped_batches_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    values = {"train_sampling_strategy": "group_by_length"}
    (alone,) = pool(1).run(rebalanced, str(tmp_path), {**layout(1, 1), **values})
    for found in pool(2).run(rebalanced, str(tmp_path), {**layout(2, 2), **values}):
        assert_equal(found, alone)
    (random,) = pool(1).run(rebalanced, str(tmp_path), layout(1, 1))
    assert max(abs(a - b) for a, b in zip(random.losses, alone.losses, strict=True)) > 1e-3


def test_a_length_column_orders_the_batches(tmp_path: Path) -> None:
    """length_column_name: the column is used although the model does not take it, and is not in the batches."""
    import datasets

    rows = [{"input_ids": [n] * 4, "size": n} for n in range(1, 33)]
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        train_sampling_strategy="group_by_length",
        length_column_name="size",
        use_cpu=True,
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=datasets.Dataset.from_list(rows))
    batches = list(trainer.get_train_dataloader())
    assert list(batches[0]) == ["input_ids"]
    sizes = [batch["input_ids"][:, 0].tolist() for batch in batches]
    assert sizes[0][0] == 32
    assert sorted(size for batch in sizes for size in batch) == list(range(1, 33))
    assert all(max(batch[1:]) - min(batch[1:]) < 16 for batch in sizes[1:])


def test_a_stream_keeps_its_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"per_device_train_batch_size": 2, "max_steps": 2, "use_cpu": True}
    args = TrainingArguments(str(tmp_path), train_sampling_strategy="group_by_length", **values)
    trainer = Trainer(tiny_llama(), args, train_dataset=iter([{"input_ids": [n]} for n in range(4)]))
    with caplog.at_level("WARNING"):
        batches = list(trainer.get_train_dataloader())
    assert [batch["input_ids"].flatten().tolist() for batch in batches] == [[0, 1], [2, 3]]

"""Orders that are computed: permutations, random to look at, the same for every layout, at no cost for their length."""

from __future__ import annotations

import pickle
import time
from itertools import chain, islice
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from ds_trainer import ParallelLayout
from ds_trainer.data import lengths as by_length
from ds_trainer.data import order as orders
from ds_trainer.data.lengths import BalancedBatchSampler, GroupedByLength, RoughlySorted, SortedBatchSampler
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.order import STORED_UP_TO, ComputedPermutation, epoch_order
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.parallel.batch_plan import BatchPlan
from tests.support.orders import in_full

BILLION = 10**9


class Endless(torch.utils.data.Dataset[int]):
    """Says that it has a billion samples."""

    def __len__(self) -> int:
        return BILLION

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("samples", [*range(1, 200), 255, 256, 257, 1023, 1024, 1025, 4097, 65537, 10**6 + 3])
def test_every_size_is_a_permutation_with_an_inverse(samples: int) -> None:
    order, positions = ComputedPermutation(samples, 3, samples % 7), np.arange(samples)
    found = order.at(positions)
    assert np.array_equal(np.sort(found), positions)
    assert np.array_equal(order.indices_of(found), positions)


def test_distant_positions_are_mapped_and_mapped_back() -> None:
    samples = 2**59 + 12345
    order, positions = ComputedPermutation(samples, 0, 0), np.arange(samples - 1000, samples)
    found = order.at(positions)
    assert len(set(found.tolist())) == 1000 and found.min() >= 0 and found.max() < samples
    assert np.array_equal(order.indices_of(found), positions)


def test_orders_do_not_change_between_versions() -> None:
    """A checkpoint resumes with the order it was written with."""
    assert ComputedPermutation(BILLION, 42, 0).at(np.arange(4)).tolist() == [365322437, 58767111, 827077777, 831048879]
    assert ComputedPermutation(STORED_UP_TO + 1, 42, 3).at(np.arange(4)).tolist() == [574528, 258928, 682790, 568825]


def deviation(order: Any, samples: int, cells: int = 32) -> float:
    """How far from random neighbours are: the largest deviation, in standard deviations, of several statistics."""
    found = order.at(np.arange(samples)).astype(np.float64)
    worst = 0.0
    for lag in (1, 2, 8, 64, 1024, 1025):
        here, there = found[:-lag], found[lag:]
        worst = max(worst, abs(float(np.corrcoef(here, there)[0, 1])) * len(here) ** 0.5)
        for counts in (
            np.histogram((there - here) % samples, cells * cells, (0, samples))[0],
            np.histogram2d(here, there, cells)[0].ravel(),
        ):
            mean = counts.mean()
            worst = max(worst, float((counts - mean).__pow__(2).sum() / mean - len(counts)) / (2 * len(counts)) ** 0.5)
    groups = found[: samples // 64 * 64].reshape(64, -1)  # every part of the epoch sees all of the dataset
    for group in groups:
        counts = np.histogram(group, cells, (0, samples))[0]
        worst = max(worst, float(((counts - counts.mean()) ** 2).sum() / counts.mean() - cells) / (2 * cells) ** 0.5)
    return worst


class Multiplied:
    """A permutation, but a poor one."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        return positions * 618_033 % (STORED_UP_TO + 7)


@pytest.mark.parametrize("epoch", range(3))
def test_neighboring_positions_are_uncorrelated(epoch: int) -> None:
    samples = STORED_UP_TO + 7
    assert deviation(ComputedPermutation(samples, 5, epoch), samples) < 6


def test_control_a_poor_permutation_is_detected() -> None:
    assert deviation(Multiplied(), STORED_UP_TO + 7) > 100


def test_orders_of_different_epochs_and_seeds_are_uncorrelated() -> None:
    samples, positions = STORED_UP_TO + 7, np.arange(STORED_UP_TO + 7)
    found = {(s, e): ComputedPermutation(samples, s, e).at(positions) for s in (0, 1) for e in (0, 1, 2)}
    keys = list(found)
    for index, one in enumerate(keys):
        assert (found[one] == positions).sum() < 12  # 1 is expected
        for other in keys[:index]:
            assert (found[one] == found[other]).sum() < 12
            assert abs(float(np.corrcoef(found[one], found[other])[0, 1])) * samples**0.5 < 6
    assert ComputedPermutation(samples, -1, 0).at(positions[:5]).tolist() != found[0, 0][:5].tolist()


def test_short_orders_are_those_of_torch() -> None:
    drawn = torch.randperm(STORED_UP_TO, generator=torch.Generator().manual_seed(9)).numpy()
    assert np.array_equal(epoch_order(STORED_UP_TO, 7, 2, True).at(np.arange(STORED_UP_TO)), drawn)
    assert isinstance(epoch_order(STORED_UP_TO + 1, 7, 2, True), ComputedPermutation)


# -- a billion samples ------------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of how many positions each lookup has."""
    found, at = [], ComputedPermutation.at

    def noted(self: ComputedPermutation, positions: np.ndarray) -> np.ndarray:
        found.append(len(positions))
        return at(self, positions)

    monkeypatch.setattr(ComputedPermutation, "at", noted)
    return found


def long_sampler(
    dp: int, rank: int, micro: int, accumulation: int = 1, shuffle: bool = True
) -> DistributedBatchSampler:
    return DistributedBatchSampler(BatchPlan(ParallelLayout(dp), micro, accumulation), BILLION, rank, 5, shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("first_sample", [0, BILLION // 2, BILLION - 64])
def test_an_epoch_of_a_billion_samples_can_start_anywhere_without_delay(
    first_sample: int, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    at = ComputedPermutation.at
    monkeypatch.setattr(
        ComputedPermutation, "at", lambda self, positions: looked_up.append(len(positions)) or at(self, positions)
    )
    loader = PlannedLoader(Endless(), long_sampler(4, 1, 4, shuffle=shuffle), list)
    memory, started = psutil.Process().memory_info().rss, time.process_time()
    loader.start(3, first_sample)
    batches = iter(loader)
    first = next(batches)
    assert loader.positions(range(2, 4))[0] == (next(batches), next(batches))[1]
    assert time.process_time() - started < 1.0
    assert psutil.Process().memory_info().rss - memory < 50 * 2**20
    # Of 64 micro-steps, of the two that were asked for, and of the three batches, whose samples are counted.
    assert sum(looked_up) <= 64 * 4 + 2 * 4 + 3 * 4
    assert len(first) == 4 and (first == list(range(first_sample + 4, first_sample + 8))) is not shuffle


def test_the_samples_of_a_replica_are_counted_without_reading_the_order() -> None:
    parts = [long_sampler(3, rank, 4) for rank in range(3)]
    assert sum(len(part.sampler) for part in parts) == BILLION
    for part in parts:
        part.first_sample = BILLION - 100
        assert len(part.sampler) == len(list(part.sampler))
    assert sum(len(part.sampler) for part in parts) == 100


def test_every_layout_sees_the_global_batches_of_one_process() -> None:
    def steps(dp: int, micro: int, accumulation: int, first_sample: int) -> list[list[int]]:
        samplers = [long_sampler(dp, rank, micro, accumulation) for rank in range(dp)]
        for sampler in samplers:
            sampler.epoch, sampler.first_sample = 2, first_sample
        micro_steps = [list(chain(*shards)) for shards in islice(zip(*samplers, strict=True), 130 * accumulation)]
        return [list(chain(*micro_steps[i : i + accumulation])) for i in range(0, len(micro_steps), accumulation)]

    alone = steps(1, 8, 1, 0)
    for dp, micro, accumulation in ((1, 2, 4), (2, 4, 1), (4, 2, 1), (4, 1, 2)):
        assert steps(dp, micro, accumulation, 0) == alone
        assert steps(dp, micro, accumulation, 80) == steps(1, 8, 1, 80)
    assert steps(1, 8, 1, 80)[:100] == alone[10:110]  # resumed
    assert len(set(chain(*alone))) == 8 * 130


def test_loading_processes_read_the_same() -> None:
    def batches(workers: int, **options: Any) -> list[list[list[int]]]:
        loader = PlannedLoader(Endless(), long_sampler(2, 1, 3), list, workers, **options)
        found = []
        for epoch, first_sample in ((0, 0), (1, 600)):  # persistent processes see another epoch
            loader.start(epoch, first_sample)
            found.append(list(islice(loader, 70)))
        return found

    assert batches(0) == batches(2) == batches(2, persistent_workers=True)


def samplers() -> dict[str, DistributedBatchSampler]:
    plan = BatchPlan(ParallelLayout(2), 2, 2)
    lengths = np.random.default_rng(0).integers(1, 50, 101)
    return {
        "random": DistributedBatchSampler(plan, 101, 1, 3),
        "long": long_sampler(2, 1, 2),
        "sequential": DistributedBatchSampler(plan, 101, 1, 3, shuffle=False),
        "grouped": DistributedBatchSampler(plan, 101, 1, 3, order=GroupedByLength(lengths, plan.global_batch_size, 3)),
        "sortish": DistributedBatchSampler(plan, 101, 1, 3, order=RoughlySorted(lengths, plan.global_batch_size, 3)),
        "balanced": BalancedBatchSampler(plan, lengths, 1, 3),
        "sorted": SortedBatchSampler(plan, lengths, 1),
    }


@pytest.mark.parametrize("name", samplers())
def test_a_sampler_in_use_can_be_pickled(name: str) -> None:
    sampler = samplers()[name]
    sampler.epoch, sampler.first_sample = 1, 8
    wanted = list(islice(sampler, 20))
    assert len(pickle.dumps(sampler)) < 10_000
    assert list(islice(pickle.loads(pickle.dumps(sampler)), 20)) == wanted
    assert [sampler.rank_batch_of(index) for index in range(20)] == wanted


# -- by length --------------------------------------------------------------------------------------------------------


def reference_order(kind: str, lengths: np.ndarray, shuffled: np.ndarray, step: int, others: np.ndarray) -> list[int]:
    """The order by length, made as a whole from the random one; ``others`` is the random order of the later batches."""
    window = step * (50 if kind == "sortish" else max(1, min(len(lengths) // (step * 4), 50)))
    windows = [
        sorted(shuffled[i : i + window].tolist(), key=lambda s: -lengths[s]) for i in range(0, len(shuffled), window)
    ]
    longest = max(range(len(windows)), key=lambda index: lengths[windows[index][0]])
    if kind == "grouped":
        windows[0][0], windows[longest][0] = windows[longest][0], windows[0][0]
        return list(chain(*windows))
    order, full_batches, first = list(chain(*windows)), len(lengths) // step * step, longest * window
    if first == full_batches and full_batches:
        order[0], order[first], first = order[first], order[0], 0
    batches = [order[i : i + step] for i in range(0, full_batches, step)]
    leading = batches.pop(first // step) if batches else []
    return [*leading, *chain(*(batches[place] for place in others)), *order[full_batches:]]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("samples", [1, 3, 64, 203, 401, 1207])
@pytest.mark.parametrize("kind", ["grouped", "sortish"])
def test_an_order_by_length_is_computed_per_window(
    kind: str, samples: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stored:
        for module in (orders, by_length):
            monkeypatch.setattr(module, "STORED_UP_TO", 0)
    step = 4
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 50 + 50 * samples * (seed % 2), samples)
        order = {"grouped": GroupedByLength, "sortish": RoughlySorted}[kind](lengths, step, seed)(1)
        random, others = (in_full(epoch_order(n, seed, 1, True)) for n in (samples, max(0, samples // step - 1)))
        assert isinstance(epoch_order(samples, seed, 1, True), ComputedPermutation) is not stored
        assert in_full(order) == reference_order(kind, lengths, np.array(random), step, np.array(others, np.int64))


def test_a_long_order_by_length_sorts_only_the_windows_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, step = 4 * STORED_UP_TO, 64
    lengths = np.random.default_rng(0).integers(1, 500, samples, np.int32)
    looked_up: list[int] = []
    at = ComputedPermutation.at
    monkeypatch.setattr(
        ComputedPermutation, "at", lambda self, positions: looked_up.append(len(positions)) or at(self, positions)
    )
    sampler = DistributedBatchSampler(
        BatchPlan(ParallelLayout(8), 8), samples, 3, 5, order=GroupedByLength(lengths, step, 5)
    )
    sampler.first_sample = samples // 2 // step * step
    batches = list(islice(sampler, 64))
    assert sum(looked_up) <= 4 * 50 * step  # the first window, and those of 64 micro_steps
    assert all(np.ptp(lengths[batch]) < 15 for batch in batches)

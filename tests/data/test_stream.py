"""Iterable data: sharding, ragged ends, loader workers, epochs, and ranks that read different data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from ds_trainer import ConfigError
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.lockstep import Lockstep, fingerprint
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.data.stream import StreamLoader, StreamShard, is_stream, length_of
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from tests.support.pool import pool


class Counting(IterableDataset[Any]):
    """0, 1, 2, ... reshuffled in every epoch by a generator that the trainer seeds."""

    def __init__(self, samples: int, shuffled: bool = False) -> None:
        self.samples = samples
        self.generator = torch.Generator() if shuffled else None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            return iter(range(self.samples))
        return iter(torch.randperm(self.samples, generator=self.generator).tolist())


class Epochs:
    """An iterable of an unknown class with ``set_epoch``."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 6))


class SharesItsEpoch(Epochs):
    """As `datasets`: in memory of all processes, and the difference is added. Here two workers always do so at once."""

    def __init__(self) -> None:
        self.shared, self.main, self.both = torch.zeros((), dtype=torch.int64).share_memory_(), os.getpid(), Barrier(2)

    def set_epoch(self, epoch: int) -> None:
        difference = epoch - int(self.shared)
        if os.getpid() != self.main:
            self.both.wait(60)
        self.shared += difference
        if os.getpid() != self.main:
            self.both.wait(60)
        self.epoch = int(self.shared)


class KeepsToItsWorker(Counting):
    """Splits itself among loading processes, as torch's documentation shows; here nothing may be left out by it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.samples)) if info is None else iter(range(info.id, self.samples, info.num_workers))


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(rows)}


def loader(
    stream: Any, dp: int, rank: int, micro: int = 2, workers: int = 0, drop_last: bool = False, **options: Any
) -> StreamLoader:
    plan = BatchPlan(ParallelLayout(dp), micro, drop_last=drop_last)
    return StreamLoader(StreamShard(stream, plan, rank, collate, seed=3), 3, workers, **options)


def content(batches: Any) -> list[Any]:
    return [("dummy" if isinstance(batch, DummyBatch) else "own", batch["x"].tolist()) for batch in batches]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_stream_is_sharded_like_a_map_dataset(n: int, dp: int, micro: int, drop_last: bool) -> None:
    plan = BatchPlan(ParallelLayout(dp), micro, drop_last=drop_last)
    for rank in range(dp):
        sampler = DistributedBatchSampler(plan, n, rank, shuffle=False)
        wanted = [("dummy" if sampler.is_dummy(i) else "own", rows) for i, rows in enumerate(sampler)]
        assert content(loader(Counting(n), dp, rank, micro, drop_last=drop_last)) == wanted


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("samples", [0, 1, 12, 13, 21])
def test_loading_processes_keep_the_order(samples: int, workers: int) -> None:
    alone = content(loader(Counting(samples), 2, 1))
    assert content(loader(Counting(samples), 2, 1, workers=workers)) == alone


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_loading_processes_may_be_forked_or_spawned(start: str) -> None:
    one = loader(Plain(), 1, 0, workers=1, multiprocessing_context=start)
    one.start(1, first_sample=2)
    assert [batch["x"].tolist() for batch in one] == [[2, 3], [4]]


class Plain:
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_stream_that_splits_itself_over_workers_is_read_completely() -> None:
    assert content(loader(KeepsToItsWorker(13), 1, 0, workers=2)) == content(loader(Counting(13), 1, 0))


@pytest.mark.parametrize(("workers", "stay"), [(0, False), (2, False), (2, True)])
def test_any_epoch_can_start_at_any_micro_step(workers: int, stay: bool) -> None:
    options = {"persistent_workers": True} if stay else {}
    one = loader(Counting(21, shuffled=True), 2, 1, workers=workers, **options)
    one.start(3)
    full = content(one)
    one.start(3, first_sample=4 * 4)
    assert content(one) == full[4:]
    one.start(4)
    assert content(one) != full
    seen = loader(Epochs(), 1, 0, workers=workers, **options)
    for epoch in (0, 1, 2):
        seen.start(epoch)
        assert content(seen)[0] == ("own", [100 * epoch, 100 * epoch + 1])


@pytest.mark.parametrize("stay", [False, True])
def test_workers_that_share_an_epoch_read_the_same_one(stay: bool) -> None:
    one = loader(SharesItsEpoch(), 1, 0, workers=2, persistent_workers=stay)
    for epoch in (0, 1, 2):
        one.start(epoch)
        assert [batch["x"].tolist()[0] for batch in one] == [100 * epoch + x for x in (0, 2, 4)]


def test_loading_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert content(loader(Counting(9, shuffled=True), 1, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_iterable_datasets_are_streams() -> None:
    import datasets

    table = datasets.Dataset.from_list([{"a": 1}] * 4)
    assert is_stream(Counting(3)) and is_stream(Epochs()) and is_stream(iter([1])) and is_stream({1, 2})
    assert is_stream(table.to_iterable_dataset())
    assert not is_stream([1, 2]) and not is_stream(table) and not is_stream(object())
    assert (length_of([1, 2]), length_of(Counting(3)), length_of(iter([]))) == (2, None, None)


def test_length_of_the_loader() -> None:
    class Sized(Counting):
        def __len__(self) -> int:
            return self.samples

    assert len(loader(Sized(9), 2, 0)) == 3
    with pytest.raises(TypeError):
        len(loader(Counting(9), 2, 0))


def test_datasets_streams_with_shards() -> None:
    import datasets

    table = datasets.Dataset.from_dict({"x": list(range(13))})
    stream = table.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)

    def read(workers: int, epoch: int) -> list[int]:
        plan = BatchPlan(ParallelLayout(1), 2)
        one = StreamLoader(StreamShard(stream, plan, 0, lambda rows: collate([r["x"] for r in rows])), 3, workers)
        one.start(epoch)
        return [x for batch in one for x in batch["x"].tolist()]

    assert sorted(read(0, 0)) == list(range(13))
    assert read(2, 0) == read(0, 0)
    assert read(0, 1) != read(0, 0)


def test_fingerprints_depend_on_numbers_and_strings() -> None:
    sample = {"a": torch.arange(4), "b": "text", "c": [1, 2], "d": np.ones(3), "e": None, "f": [{"g": 1.5}]}
    assert fingerprint(sample) == fingerprint({key: sample[key] for key in reversed(sample)})
    assert fingerprint(sample) == fingerprint({**sample, "a": torch.arange(8)[:4]})
    changes = {"a": torch.arange(1, 5), "b": "texts", "c": [2, 1], "d": np.zeros(3), "e": 0, "f": [{"g": 1.25}]}
    for key, value in changes.items():
        assert fingerprint({**sample, key: value}) != fingerprint(sample)


# -- ranks that do not read the same ---------------------------------------------------------------------------------


def read_on_this_rank(kind: str) -> str:
    rank = distributed.rank()
    source = {
        "alike": lambda: Counting(14),
        "longer on rank 1": lambda: Counting(14 + 8 * rank),
        "ends a window later": lambda: Counting(12 + 4 * rank),
        "other data on rank 1": lambda: [7 + rank, *range(13)],
    }[kind]()
    stream = source if isinstance(source, Counting) else iter(source)
    try:
        return str(content(loader(stream, 2, rank)))
    except ConfigError as error:
        return str(error)


def test_ranks_that_read_equal_data_agree() -> None:
    assert pool(2).run(read_on_this_rank, "alike") == [str(content(loader(Counting(14), 2, rank))) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("longer on rank 1", "they have read [4, 6] of its batches"),
        ("ends a window later", "they have read [3, 4] of its batches"),
        ("other data on rank 1", "The ranks read different data after batch 0"),
    ],
)
def test_different_data_is_reported_on_all_ranks(kind: str, text: str) -> None:
    for message in pool(2).run(read_on_this_rank, kind):
        assert text in message


def test_at_most_one_window_is_read_ahead() -> None:
    steps = Lockstep(iter([(item, 0) for item in "abcde"]), 2)
    seen = []
    while ahead := steps.ahead():
        seen.append([next(steps) for _ in range(ahead)])
    assert seen == [["a", "b"], ["c", "d"], ["e"]]
    assert list(steps) == []

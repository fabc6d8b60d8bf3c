"""Streams that replicas read in part: who reads what, the order, resuming in any layout, uneven shards, refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from ds_trainer import ConfigError
from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.packing.datasets import packed_stream
from ds_trainer.data.stream import StreamLoader, StreamResume, StreamShard
from ds_trainer.data.stream_shards import StreamOrder, stream_order, warn_of_readers
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from tests.support.pool import pool


class Files(IterableDataset[int]):
    """Files with the samples ``100 * file + n``; ``read`` counts those that any process reads. It has a state."""

    def __init__(self, lengths: list[int], files: list[int] | None = None) -> None:
        self.lengths = lengths
        self.files = list(range(len(lengths))) if files is None else files
        self.read = torch.zeros((), dtype=torch.int64).share_memory_()
        self.at = self.start = 0

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        part = type(self)(self.lengths, self.files[index::num_shards])
        part.read = self.read
        return part

    def __iter__(self) -> Iterator[int]:
        samples = [100 * file + n for file in self.files for n in range(self.lengths[file])]
        self.at, self.start = self.start, 0
        for sample in samples[self.at :]:
            self.read += 1
            self.at += 1
            yield sample
        self.at = 0  # as streams of users do

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class WithoutState(Files):
    state_dict = load_state_dict = None  # type: ignore[assignment]


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([row["x"] if isinstance(row, dict) else row for row in rows])}


def loader(
    stream: Any,
    dp: int,
    replica: int,
    setting: Any = "auto",
    *,
    micro: int = 2,
    accumulation: int = 1,
    workers: int = 0,
    drop_last: bool = False,
) -> StreamLoader:
    plan = BatchPlan(ParallelLayout(dp), micro, accumulation, drop_last)
    order = stream_order(stream, plan, replica, setting, workers)
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    return StreamLoader(StreamShard(stream, plan, replica, collate, 3, order), accumulation, workers, **options)


def samples_of(batches: Any) -> list[list[int]]:
    return [[] if isinstance(batch, DummyBatch) else batch["x"].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


LENGTHS = [7, 5, 7, 6, 0, 7, 1, 7]
EVERY = sorted(100 * file + n for file, length in enumerate(LENGTHS) for n in range(length))


# -- the order ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30))
def test_every_place_belongs_to_one_replica(shards: int, run: int, dp: int, micro: int, first: int) -> None:
    order, plan = StreamOrder(shards, run), BatchPlan(ParallelLayout(dp), micro)
    found = []
    for replica in range(dp):
        for step in range(6):
            place = first + step * plan.samples_per_micro_step + order.offset_of(replica, plan, first)
            pieces = list(order.pieces(place, micro))
            assert all(shard in order.shards_of(replica, plan, first) for shard, _, _ in pieces)
            found += [(shard, index + n) for shard, index, count in pieces for n in range(count)]
    places = [(p // run % shards, p // run // shards * run + p % run) for p in range(first, first + 6 * dp * micro)]
    assert sorted(found) == sorted(places) and len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("available", "dp", "workers", "expected"),
    [
        *((64, 8, 0, 8), (64, 8, 2, 16), (8, 8, 4, 8), (8, 1, 0, 0), (8, 1, 4, 4)),
        *((4, 8, 0, 4), (12, 8, 0, 4), (1000, 64, 0, 64), (3, 8, 0, 0), (1, 8, 0, 0), (9, 6, 0, 3)),
    ],
)
def test_shards_are_chosen_of_about_equal_length(available: int, dp: int, workers: int, expected: int) -> None:
    plan = BatchPlan(ParallelLayout(dp), 2)
    order = stream_order(Files([1] * available), plan, 0, "auto", workers)
    assert order == (StreamOrder(expected, 2) if expected else StreamOrder())


# -- who reads what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_each_replica_reads_what_it_trains_on(dp: int) -> None:
    for epoch in (0, 1):
        found: list[int] = []
        for replica in range(dp):
            stream = Files([6] * 16)
            one = loader(stream, dp, replica)
            one.start(epoch)
            own = flat(samples_of(one))
            assert len(own) == 96 // dp == int(stream.read)
            found += own
        assert sorted(found) == [100 * file + n for file in range(16) for n in range(6)]


def test_without_shards_each_replica_reads_everything() -> None:
    stream = Files([6] * 16)
    assert len(flat(samples_of(loader(stream, 4, 0, None)))) == 24 and stream.read == 96


def test_streams_of_datasets_have_the_same_samples_in_every_epoch() -> None:
    import datasets

    table = datasets.Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=4)
    for stream in (table, table.shuffle(seed=1, buffer_size=6)):
        epochs = []
        for epoch in (0, 1):
            loaders = [loader(stream, 2, replica) for replica in (0, 1)]
            for one in loaders:
                one.start(epoch)
            epochs.append([flat(samples_of(one)) for one in loaders])
            assert sorted(flat(epochs[-1])) == list(range(50))
        assert len(epochs[0][0]) < 30 and (stream is table or epochs[0] != epochs[1])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_read_different_shards(workers: int) -> None:
    stream = Files([6] * 12)
    own = flat(samples_of(loader(stream, 2, 1, workers=workers)))
    assert len(own) == 36 == len(set(own)) and stream.read == 36
    kept = loader(stream, 2, 1, 12, workers=workers)  # a given number: the order is the same for any number of workers
    assert samples_of(kept) == samples_of(loader(stream, 2, 1, 12))


@pytest.mark.parametrize(("lengths", "dp"), [([2, 8, 8, 8], 1), ([0, 3, 9, 1], 1), ([2, 9, 9, 3, 0, 9, 1, 9], 2)])
def test_workers_keep_the_order_of_shards_of_other_lengths(lengths: list[int], dp: int) -> None:
    for replica in range(dp):
        alone, shared = (loader(Files(lengths), dp, replica, len(lengths), workers=workers) for workers in (0, 2))
        states = [[(batch, dict(one.state or {})) for batch in samples_of(one)] for one in (alone, shared)]
        assert states[0] == states[1]


def test_packed_rows_of_shards_have_every_sample_once() -> None:
    import datasets

    table = datasets.Dataset.from_dict({"input_ids": [[n] * (1 + n % 5) for n in range(60)]})
    rows = packed_stream(table.to_iterable_dataset(num_shards=4), 8, PackingStrategy.BEST_FIT)
    plan, found = BatchPlan(ParallelLayout(2), 2), []
    for replica in range(2):
        order = stream_order(rows, plan, replica, "auto")
        for row in flat(list(StreamLoader(StreamShard(rows, plan, replica, list, 0, order), 1))):  # type: ignore[arg-type]
            found += [piece.sample["input_ids"][0] for piece in row]  # type: ignore[attr-defined]
    assert order.shards == 2 and sorted(found) == list(range(60)) and rows.summary.samples == 60


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Files, WithoutState])
@pytest.mark.parametrize(("dp", "micro", "workers"), [(4, 2, 0), (4, 2, 2), (2, 2, 0), (1, 2, 0), (8, 2, 2), (3, 5, 0)])
def test_an_epoch_resumes_in_any_layout(kind: type[Files], dp: int, micro: int, workers: int) -> None:
    """A step of 4 replicas, then the rest in another layout: the same global batches as without a stop."""
    states: dict[int, Any] = {}
    whole: list[list[list[int]]] = []
    for replica in range(4):
        one = loader(kind(LENGTHS), 4, replica, 8, accumulation=3)
        one.start(1)
        batches = iter(one)
        taken = [next(batches) for _ in range(3)]
        states.update(one.state or {})
        whole.append(samples_of(taken + list(batches)))
    assert sorted(flat(flat(whole))) == EVERY  # type: ignore[arg-type]
    done = 3 * 8
    rest: list[list[list[int]]] = []
    reads = []
    for replica in range(dp):
        stream = kind(LENGTHS)
        one = loader(stream, dp, replica, "auto", micro=micro, workers=workers, accumulation=3)
        at = one.shards_of(StreamOrder(8, 2), done)
        own = {number: state for number, state in states.items() if number in at}
        one.start(1, done, StreamResume(1, own if kind is Files else None), order=StreamOrder(8, 2))
        rest.append(samples_of(one))
        reads.append(int(stream.read))
    before = {sample for batches in whole for batch in batches[:3] for sample in batch}
    assert sorted(flat(flat(rest))) == sorted(set(EVERY) - before)  # type: ignore[arg-type]
    if (dp, micro) == (4, 2):
        assert [batches[: len(rest[0])] for batches in rest] == [
            (batches[3:] + [[]] * 9)[: len(rest[0])] for batches in whole
        ]
    if kind is Files and micro == 2 and dp * max(1, workers) <= 8:  # a shard has one reader, which begins where it was
        assert sum(reads) <= len(EVERY) - len(before) + 2 * dp
    if kind is WithoutState and (dp, micro, workers) == (1, 2, 0):
        assert sum(reads) == len(EVERY)  # negative control: what has no state is read again


def test_states_are_those_of_the_end_of_a_step() -> None:
    one = loader(Files([8] * 4), 2, 0, 4, accumulation=2)
    seen = [dict(one.state or {}) for _ in one]
    assert seen[0] == seen[1] and {number: state["index"] for number, state in seen[1].items()} == {0: 2, 2: 2}
    assert {number: (state["index"], state["ended"]) for number, state in seen[-1].items()} == {
        **{0: (8, False), 2: (8, False)}
    }


# -- shards of other lengths -------------------------------------------------------------------------------------------


def read_on_this_rank(lengths: list[int], setting: Any, workers: int = 0, drop_last: bool = False) -> Any:
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    options: Any = {"accumulation": 3, "workers": workers, "drop_last": drop_last}
    one = loader(Files(lengths), distributed.world_size(), distributed.rank(), setting, **options)
    try:
        return samples_of(one)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("setting", "workers"), [(2, 0), (4, 0), (8, 0), (8, 2), (6, 2)])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 0, 0, 3, 9, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8])
def test_ranks_end_together_and_no_sample_is_lost(setting: int, workers: int, lengths: list[int]) -> None:
    found = pool(2).run(read_on_this_rank, lengths, setting, workers)
    wanted = [100 * file + n for file, length in enumerate(lengths) for n in range(length)]
    assert len(found[0]) == len(found[1])
    assert sorted(flat(found[0]) + flat(found[1])) == wanted


def test_incomplete_micro_steps_can_be_dropped() -> None:
    found = pool(2).run(read_on_this_rank, [6, 6, 6, 3], 2, 0, True)
    assert [len(batch) for batch in found[0] + found[1]] == [2] * 8
    assert sorted(flat(found[0])) == [0, 1, 2, 3, 4, 5, 200, 201]


def test_a_long_shard_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        list(loader(Files([50] * 4), 1, 0, 4, micro=2, accumulation=2))
        assert not caplog.messages
        list(loader(Files([50, 50, 50, 100]), 1, 0, 4, micro=2, accumulation=2))
    assert "fewer samples or none, because the shards of the stream differ in length" in caplog.messages[0]


# -- datasets that divide themselves -----------------------------------------------------------------------------------


class OwnPart(IterableDataset[int]):
    """Each rank reads its own third of the numbers; ``more`` on the last."""

    def __init__(self, more: int = 0) -> None:
        self.more = more

    def __iter__(self) -> Iterator[int]:
        rank, ranks = distributed.rank(), distributed.world_size()
        yield from range(rank, 20, ranks)
        yield from range(100, 100 + self.more * (rank == ranks - 1))


def read_own(kind: str, setting: Any) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    rank, ranks = distributed.rank(), distributed.world_size()
    table = datasets.Dataset.from_dict({"x": list(range(22))}).to_iterable_dataset(num_shards=3)
    stream: Any = {
        "by node": lambda: split_dataset_by_node(table, rank, ranks),
        "the same node": lambda: split_dataset_by_node(table, 0, ranks),
        "one rank": lambda: split_dataset_by_node(table, 0, ranks) if rank == 0 else table,
        "other files": lambda: Files([5] * (2 + 2 * rank)),
        "itself": OwnPart,
        "itself, uneven": lambda: OwnPart(9),
        "nothing on rank 0": lambda: Files([0 if rank == 0 else 5]),
    }[kind]()
    one = loader(stream, ranks, rank, setting)
    try:
        return samples_of(one)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "setting", "wanted"),
    [
        ("by node", None, list(range(22))),
        ("by node", "own", list(range(22))),
        ("the same node", None, list(range(0, 22, 2))),
        ("itself", "own", list(range(20))),
        ("itself, uneven", "own", [*range(20), *range(100, 109)]),
    ],
)
def test_each_replica_may_have_its_own_dataset(kind: str, setting: str | None, wanted: list[int]) -> None:
    found = pool(2).run(read_own, kind, setting)
    assert len(found[0]) == len(found[1]) and sorted(flat(found[0]) + flat(found[1])) == wanted


@pytest.mark.parametrize(
    ("kind", "setting", "text"),
    [
        ("itself", None, "set stream_shards='own'"),
        ("one rank", None, "different"),
        ("one rank", "auto", "different"),
        ("other files", "auto", "different numbers of shards (2, 4; rank 0 has 2, rank 1 another number)"),
        ("nothing on rank 0", "own", "at least one replica is empty"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(kind: str, setting: str | None, text: str) -> None:
    for message in pool(2).run(read_own, kind, setting):
        assert text in message


@pytest.mark.parametrize(
    ("order", "dp", "micro", "setting", "text"),
    [
        (StreamOrder(4, 2, True), 2, 2, "own", "gave each of 4 replicas its own samples, 2 in a micro-batch. Now"),
        (StreamOrder(2, 2, True), 2, 4, "own", "Now the dataset gave each of 2 replicas its own samples, 4 in"),
        (StreamOrder(2, 2, True), 2, 2, "auto", "Now the dataset gave all replicas the same samples"),
        (StreamOrder(), 2, 2, "own", "gave all replicas the same samples. Now the dataset gave each of 2"),
        (StreamOrder(9, 2), 2, 2, "auto", "came from 9 shards of the stream. Now train_dataset, a Files, has 8 shards"),
    ],
)
def test_an_order_that_cannot_be_continued_is_refused(
    order: StreamOrder, dp: int, micro: int, setting: str, text: str
) -> None:
    one = loader(Files(LENGTHS), dp, 0, setting, micro=micro)
    one.start(0, 8, order=order)
    with pytest.raises(ConfigError, match="in the middle of an epoch") as error:
        iter(one)
    assert text in str(error.value) and "ignore_data_skip=True" in str(error.value)


def test_more_shards_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stream_shards=9, but train_dataset, a Files, has 8: .* at most 8, 'auto'"):
        loader(Files(LENGTHS), 2, 0, 9)


@pytest.mark.parametrize(
    ("available", "dp", "setting", "text"),
    [
        (16, 7, None, ""),
        (16, 8, None, "read by 8 replicas and used by one. It has 16 shards: with stream_shards='auto' each replica"),
        (1, 8, None, "no shards that a replica could read alone"),
        *((16, 8, "auto", ""), (1, 2, "auto", "no shards"), (1, 64, "own", ""), (4, 4, 2, "read by 2 replicas")),
        (4, 8, "auto", "read by 2 replicas and used by one. It has 4 shards for 8 replicas: a multiple of 8 could be"),
    ],
)
def test_reading_more_than_once_is_said(
    available: int, dp: int, setting: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Files([4] * available)
    order = stream_order(stream, BatchPlan(ParallelLayout(dp), 2), 0, setting)
    with caplog.at_level(logging.WARNING):
        warn_of_readers(stream, order, dp, setting)
    assert text in " ".join(caplog.messages) and bool(text) == bool(caplog.messages)
    assert order.readers(dp) == dp // math.gcd(dp, max(1, order.shards)) or order.own

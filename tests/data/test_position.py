"""Going on in the middle of an epoch: every sample once, whatever the micro_steps before and after were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_trainer import ParallelLayout
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.lengths import BalancedBatchSampler, GroupedByLength, RoughlySorted
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.order import epoch_order
from ds_trainer.data.position import DataPosition
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.data.skipping import skip, with_random_state
from ds_trainer.data.stream import StreamLoader, StreamResume, StreamShard, has_state
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils.seeds import random_state
from tests.support.orders import in_full

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))  # dp, micro-batch, accumulation


def seen(samplers: list[Any]) -> list[int]:
    """The rest of an epoch of all replicas, by micro-step."""
    micro_steps = zip(*(list(sampler) for sampler in samplers), strict=True)
    return [
        position
        for index, shards in enumerate(micro_steps)
        for sampler, shard in zip(samplers, shards, strict=True)
        if not sampler.is_dummy(index)
        for position in shard
    ]


@settings(deadline=None)
@given(st.integers(1, 60), SIZES, SIZES, st.integers(0, 8), st.booleans())
def test_no_sample_is_repeated_or_skipped_when_the_batch_changes(
    samples: int, old: Any, new: Any, steps: int, balanced: bool
) -> None:
    before, after = (BatchPlan(ParallelLayout(dp), micro, accumulation) for dp, micro, accumulation in (old, new))
    had = min(steps * before.global_batch_size, samples)
    lengths = [1 + (7 * index) % 11 for index in range(samples)]
    samplers: list[Any] = []
    for rank in range(after.layout.dp):
        one = (
            BalancedBatchSampler(after, lengths, rank, seed=3)
            if balanced
            else DistributedBatchSampler(after, samples, rank, seed=3)
        )
        one.epoch, one.first_sample = 2, had
        samplers.append(one)
    order = in_full(epoch_order(samples, 3, 2, True))
    found = seen(samplers)
    assert sorted(found) == sorted(order[had:])
    if not balanced:
        assert found == order[had:]
        loader = PlannedLoader(list(range(samples)), samplers[0], torch.tensor)  # type: ignore[arg-type]
        assert loader.micro_steps_from(had) == len(list(samplers[0]))


@pytest.mark.parametrize("kind", [GroupedByLength, RoughlySorted])
def test_an_order_by_length_is_kept_until_the_epoch_ends(kind: Any) -> None:
    lengths = torch.randint(1, 50, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    before, after = BatchPlan(ParallelLayout(2), 3), BatchPlan(ParallelLayout(1), 4)
    old, new = kind(lengths, before.global_batch_size, 1), kind(lengths, after.global_batch_size, 1)
    assert in_full(old(3)) != in_full(new(3))  # the comparison can fail
    sampler = DistributedBatchSampler(after, len(lengths), 0, seed=1, order=new)
    sampler.epoch, sampler.first_sample, sampler.ordered_for = 3, 12, before.global_batch_size
    assert seen([sampler]) == in_full(old(3))[12:]
    sampler.epoch, sampler.first_sample, sampler.ordered_for = 4, 0, after.global_batch_size
    assert seen([sampler]) == in_full(new(4))


class Draws(torch.utils.data.Dataset[Any]):
    """Draws from all three generators at every sample, and knows its epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(torch.rand(())), float(np.random.rand()), float(self.epoch)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def drawn(first_sample: int, workers: int, epoch: int = 1) -> list[Any]:
    sampler = DistributedBatchSampler(BatchPlan(ParallelLayout(1), 2), 23, 0, seed=5)
    loader = PlannedLoader(Draws(), sampler, torch.tensor, workers)
    loader.start(epoch, first_sample)
    return [batch.tolist() for batch in loader]


def test_draws_of_loader_workers_depend_only_on_the_position() -> None:
    full = drawn(0, 2)
    assert drawn(6, 2) == drawn(6, 1) == drawn(6, 3) == full[3:]
    assert all(row[3] == 1.0 for batch in full for row in batch)
    assert drawn(0, 2, epoch=2) != full


class Numbers:
    """A stream that counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length, self.read, self.generator = length, 0, torch.Generator()

    def __iter__(self) -> Iterator[int]:
        for number in torch.randperm(self.length, generator=self.generator).tolist():
            self.read += 1
            yield number


class StatefulStream(Numbers):
    place = 0

    def __iter__(self) -> Iterator[int]:
        for number in torch.randperm(self.length, generator=self.generator).tolist()[self.place :]:
            self.place += 1
            self.read += 1
            yield number
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def stream_loader(stream: Any, dp: int, micro: int, accumulation: int = 1, workers: int = 0) -> StreamLoader:
    plan = BatchPlan(ParallelLayout(dp), micro, accumulation)
    return StreamLoader(StreamShard(stream, plan, 0, torch.tensor, seed=3), accumulation, workers)


@pytest.mark.cases(5)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Numbers, StatefulStream])
def test_a_stream_resumes_with_another_batch_size(kind: Any, workers: int) -> None:
    full = [number for batch in stream_loader(kind(40), 1, 4) for number in batch.tolist()]
    first = stream_loader(kind(40), 1, 4, accumulation=2, workers=workers)
    first.start(0)
    states = []
    for _ in zip(range(4), first, strict=False):
        states.append(first.state)
    # The micro_steps of a step are read together: what is known is the state at its end.
    assert states == ([{"place": 8}] * 2 + [{"place": 16}] * 2 if kind is StatefulStream else [None] * 4)
    stream = kind(40)
    second = stream_loader(stream, 1, 5, workers=workers)
    second.start(0, 16, StreamResume(0, states[-1]))
    assert [number for batch in second for number in batch.tolist()] == full[16:]
    if workers == 0:
        assert stream.read == (24 if kind is StatefulStream else 40)


def test_the_last_micro_step_of_a_stream_gives_no_state() -> None:
    """What has ended may say that it is at its beginning."""
    loader = stream_loader(StatefulStream(10), 1, 4)
    assert [loader.state is None for _ in loader] == [False, False, True]


def test_a_state_is_for_its_own_epoch_only() -> None:
    loader = stream_loader(StatefulStream(8), 1, 4)
    loader.start(0, 4, StreamResume(0, {"place": 4}))
    rest = [batch.tolist() for batch in loader]
    loader.start(1)
    full = [batch.tolist() for batch in loader]
    assert (len(rest), len(full)) == (1, 2)


def test_a_shuffle_buffer_has_no_exact_state() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset()
    assert has_state(rows) and has_state(rows.map(lambda row: row))
    shuffled = rows.shuffle(seed=0, buffer_size=5)
    assert not has_state(shuffled) and not has_state(shuffled.map(lambda row: row))
    assert not has_state(Numbers(3)) and has_state(StatefulStream(3))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_huggingface_iterable_dataset_resumes(shuffled: bool) -> None:
    import datasets

    def make() -> Any:
        rows = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
        return rows.shuffle(seed=0, buffer_size=7) if shuffled else rows

    def loader() -> StreamLoader:
        plan = BatchPlan(ParallelLayout(1), 4)
        return StreamLoader(StreamShard(make(), plan, 0, lambda rows: [row["x"] for row in rows], seed=3), 1)

    first = loader()
    first.start(1)
    full = list(first)
    first.start(1)
    states = [first.state for _ in first]
    second = loader()
    second.start(1, 12, StreamResume(1, states[2]))
    assert list(second) == full[3:]
    assert sorted(number for batch in full for number in batch) == list(range(40))


def test_skipping_shows_a_progress_bar_only_if_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert skip(iter(range(50)), 40, "samples", show=True) == 40
    assert capsys.readouterr().err == ""
    assert skip(iter(range(150)), 1000, "samples", show=True) == 150
    assert "Skipping data already trained on" in capsys.readouterr().err
    assert skip(iter(range(150)), 1000, "samples", show=False) == 150
    assert capsys.readouterr().err == ""


def test_the_saved_random_state_is_used_only_while_skipping() -> None:
    then = random_state()
    wanted = torch.rand(3)
    outside = torch.rand(3)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with with_random_state(then):
        assert torch.equal(torch.rand(3), wanted) and not torch.equal(wanted, outside)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_is_plain_data() -> None:
    position = DataPosition(2, 16, 2, 4, 4, 8, True)
    assert DataPosition.from_json({**position.to_json(), "of a later version": 1}) == position
    assert isinstance(DummyBatch(), dict)

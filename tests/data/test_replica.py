"""Ranks of a replica see equal batches whatever a dataset does, replicas different ones; failures end all ranks."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ds_trainer.data import replica
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.batch_transfer import receive, send
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.replica import batches_of, replica_batches, replica_groups
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.data.stream import StreamLoader, StreamShard
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import PeerFailure, fails_together, watch_peers
from tests.support.pool import RankFailure, pool

DP2_SP2 = ParallelLayout(4, sp=2)
DP2_TP2 = ParallelLayout(4, tp=2)
TP2 = ParallelLayout(2, tp=2)


class Unsteady(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Other numbers on every rank and in every call: the sample, the rank's own noise, and three global generators."""

    def __init__(self, samples: int, rank: int | None = None) -> None:
        self.samples = samples
        self.noise = torch.Generator().manual_seed(1000 + (distributed.rank() if rank is None else rank))
        self.calls = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.calls += 1
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        own = torch.rand(3, generator=self.noise)
        return {"index": torch.tensor(index), "x": torch.cat([own, torch.tensor([*drawn, os.getpid()])])}


class Indices(IterableDataset[Any]):
    """Something that can only be iterated; replicas must agree on it, so what is unsteady is how it is collated."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class CollateUnsteadily:
    def __init__(self, samples: int) -> None:
        self.rows = Unsteady(samples)

    def __call__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return stack([self.rows[index] for index in indices])


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def as_lists(batches: Any) -> list[Any]:
    return [(type(batch).__name__, {key: value.tolist() for key, value in batch.items()}) for batch in batches]


def options(workers: int) -> dict[str, Any]:
    return {"multiprocessing_context": "fork"} if workers else {}


def planned(layout: ParallelLayout, samples: int, workers: int) -> PlannedLoader:
    dp = layout.coordinates(distributed.rank()).dp
    sampler = DistributedBatchSampler(BatchPlan(layout, micro_batch=2), samples, dp, seed=3)
    return PlannedLoader(Unsteady(samples), sampler, stack, num_workers=workers, **options(workers))


def streamed(layout: ParallelLayout, samples: int, workers: int) -> StreamLoader:
    dp = layout.coordinates(distributed.rank()).dp
    shard = StreamShard(Indices(samples), BatchPlan(layout, micro_batch=2), dp, CollateUnsteadily(samples))
    return StreamLoader(shard, window=2, num_workers=workers, **options(workers))


def foreign(layout: ParallelLayout, samples: int, workers: int) -> Any:
    dp = layout.coordinates(distributed.rank()).dp
    rows = torch.utils.data.Subset(Unsteady(samples), range(dp, samples, layout.dp))
    return batches_of(
        DataLoader(rows, batch_size=2, shuffle=True, collate_fn=stack, num_workers=workers, **options(workers)), layout
    )


KINDS = {"planned": planned, "stream": streamed, "foreign": foreign}


def let_ranks_have_children() -> None:
    """The pool's ranks are daemons of a fork server, which may have no children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def read(kind: str, layout: ParallelLayout, samples: int, workers: int) -> Any:
    let_ranks_have_children()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    loader = KINDS[kind](layout, samples, workers)
    epochs = []
    for epoch in range(1 if kind == "foreign" else 2):
        if hasattr(loader, "start"):
            loader.start(epoch)
        epochs.append(as_lists(loader))
    dataset = getattr(loader, "dataset", None)
    calls = dataset.calls if isinstance(dataset, Unsteady) else None
    return epochs, [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()], calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [DP2_SP2, DP2_TP2], ids=["sp", "tp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_a_replica_see_equal_batches_and_replicas_do_not(
    kind: str, layout: ParallelLayout, workers: int
) -> None:
    samples = 8 if kind == "foreign" else 9  # our loaders distribute a ragged last micro-step
    found = pool(4).run(read, kind, layout, samples, workers)
    for one, other in ((0, 1), (2, 3)):
        assert found[one][0] == found[other][0]  # every batch of every epoch, not only the first
        assert found[one][1] == found[other][1]  # random numbers of the model stay equal
    for epoch, (first, second) in enumerate(zip(found[0][0], found[2][0], strict=True)):
        assert len(first) == len(second) == (samples + 3) // 4
        own = [{i for name, batch in part if name != "DummyBatch" for i in batch["index"]} for part in (first, second)]
        assert own[0] | own[1] == set(range(samples)) and not own[0] & own[1], epoch
    if kind == "planned" and workers == 0:
        assert found[0][2] > 0 and found[1][2] == 0  # the other ranks never touch the dataset


def read_alone(kind: str, layout: ParallelLayout, samples: int) -> Any:
    replica.replica_groups, kept = (lambda layout: None), replica.replica_groups
    from ds_trainer.data import loader, stream

    loader.replica_groups = stream.replica_groups = replica.replica_groups
    try:
        return read(kind, layout, samples, 0)
    finally:
        replica.replica_groups = loader.replica_groups = stream.replica_groups = kept


def test_control_without_the_broadcast_ranks_of_a_replica_differ() -> None:
    """Negative control: the dataset is one that ranks reading by themselves disagree about."""
    for kind in KINDS:
        found = pool(4).run(read_alone, kind, DP2_TP2, 9)
        assert found[0][0] != found[1][0]


def draws_without_isolation(layout: ParallelLayout) -> Any:
    @contextmanager
    def nothing() -> Iterator[None]:
        replica._seed_of_data()
        yield

    replica._random_states_of_data, kept = nothing, replica._random_states_of_data
    try:
        return read("planned", layout, 9, 0)[1]
    finally:
        replica._random_states_of_data = kept


def test_control_without_isolation_data_draws_change_the_model_of_the_replica_leader() -> None:
    """Negative control of the random states."""
    found = pool(4).run(draws_without_isolation, DP2_TP2)
    assert found[0] != found[1]


def differing_epochs(layout: ParallelLayout) -> list[Any]:
    torch.manual_seed(0)
    rows = [{"index": torch.tensor(i)} for i in range(16)]
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=stack)  # type: ignore[arg-type]
    return [as_lists(batches_of(loader, layout)) for _ in range(2)]


def test_a_custom_loader_is_reshuffled_in_every_epoch() -> None:
    first, second = pool(2).run(differing_epochs, TP2)
    assert first == second
    assert first[0] != first[1]


# -- what travels -----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Own:
    """A batch of some library: neither a dict nor a tuple."""

    ids: torch.Tensor
    note: str


def things() -> list[Any]:
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(0)
    large = torch.randn(300, 100, generator=generator)
    return [
        {"a": torch.arange(6).view(2, 3).t(), "text": ["x", None], "nested": [{"b": torch.tensor(1.5)}]},
        DummyBatch({"input_ids": torch.arange(4)}),
        BatchEncoding({"input_ids": torch.ones(2, 2, dtype=torch.int32)}),
        Pair(torch.tensor([True, False]), torch.zeros(0, 5)),
        Own(torch.tensor([1, 2], dtype=torch.uint8), "note"),
        {str(dtype): large.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64)},
        {"sparse": torch.eye(3).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(2))},
        {"large": large, "same": large, "odd": torch.arange(7, dtype=torch.int8), "after": torch.arange(3)},
        {"exactly": torch.zeros(64 * 1024 - 128, dtype=torch.uint8)},
        None,
    ]


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        return type(value).__name__, str(value.dtype), tuple(value.shape), str(dense.tolist())
    if hasattr(value, "items"):
        return type(value).__name__, {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(item) for item in value]
    return (type(value).__name__, described(vars(value))) if isinstance(value, Own) else value


def exchange() -> list[Any]:
    group = parallel_groups(TP2).replica_host
    if distributed.rank() == 0:
        for thing in things():
            send(thing, group)
        return [described(thing) for thing in things()]
    return [described(receive(group)) for _ in things()]


def test_dtypes_shapes_and_values_survive_the_broadcast() -> None:
    sent, received = pool(2).run(exchange)
    assert received == sent
    assert sent[1][0] == "DummyBatch" and sent[2][0] == "BatchEncoding"


def dummy_batches_while_working() -> list[Any]:
    """A ragged last micro-step: 5 samples, 2 replicas of 2 ranks, 2 samples each; the second replica's is a dummy."""
    loader = planned(DP2_TP2, 5, 0)
    seen: list[tuple[str, bool]] = []
    inside: list[bool] = []

    @contextmanager
    def during(batch: Any) -> Iterator[None]:
        inside.append(isinstance(batch, DummyBatch))
        yield
        inside.pop()

    loader.during = during
    for batch in loader:
        seen.append((type(batch).__name__, inside[-1]))
    return [*seen, len(inside)]


def test_all_ranks_of_a_replica_know_about_a_dummy_batch() -> None:
    found = pool(4).run(dummy_batches_while_working)
    assert found[0] == found[1] == [("dict", False), ("DummyBatch", True), 0] or found[2] == found[3]
    assert [("DummyBatch", True) in seen for seen in found].count(True) == 2


def prepared() -> list[Any]:
    from ds_trainer import Trainer, TrainingArguments
    from tests.support.models import Regression

    rows = [{"index": torch.tensor(i)} for i in range(6)]
    trainer = Trainer(Regression(), TrainingArguments("unused", use_cpu=True, report_to="none"))
    loader = trainer.accelerator.prepare(DataLoader(rows, 2, shuffle=True, collate_fn=stack))  # type: ignore[arg-type]
    return as_lists(batches_of(loader, TP2))


def test_a_loader_with_collectives_is_read_on_all_ranks() -> None:
    first, second = pool(2).run(prepared)
    assert first == second


# -- the end ----------------------------------------------------------------------------------------------------------


class Breaks(Unsteady):
    """Raises at one sample."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in (5, 6):
            raise KeyError(f"sample {index} is broken")
        return super().__getitem__(index)


def breaking(workers: int) -> tuple[int, str, str]:
    let_ranks_have_children()
    layout = ParallelLayout(2, tp=2)
    sampler = DistributedBatchSampler(BatchPlan(layout, micro_batch=2), 8, 0, shuffle=False)
    loader = PlannedLoader(Breaks(8), sampler, stack, num_workers=workers, **options(workers))
    seen = 0
    try:
        for _ in loader:
            seen += 1
    except Exception as error:
        return seen, type(error).__name__, str(error)
    return seen, "", ""


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_on_the_replica_leader_ends_all_ranks_and_names_it(workers: int) -> None:
    reader, listener = pool(2).run(breaking, workers)
    assert reader[:2] == (2, "KeyError") and "sample 5 is broken" in reader[2]
    assert listener[:2] == (2, "PeerFailure")
    assert "rank 0" in listener[2] and "sample 5 is broken" in listener[2]


def unsendable() -> tuple[str, str]:
    groups = replica_groups(TP2)
    try:
        list(replica_batches(lambda: [{"f": lambda: None}], groups))
    except (ConfigError, PeerFailure) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_batch_that_cannot_be_sent_is_rejected_on_all_ranks() -> None:
    reader, listener = pool(2).run(unsendable)
    assert reader[0] == "ConfigError" and "data_collator" in reader[1]
    assert listener[0] == "PeerFailure" and "cannot be sent" in listener[1]


def fails_in_one_replica(directory: str) -> None:
    watch_peers()
    layout, rank = DP2_TP2, distributed.rank()
    dp = layout.coordinates(rank).dp
    sampler = DistributedBatchSampler(BatchPlan(layout, micro_batch=2), 8, dp, shuffle=False)
    loader = PlannedLoader((Breaks if dp == 1 else Unsteady)(8), sampler, stack)

    @fails_together
    def work() -> None:
        for _ in loader:
            distributed.barrier()

    try:
        work()
    except Exception as error:
        Path(directory, str(rank)).write_text(f"{type(error).__name__}: {error}")
        time.sleep(0.0 if rank else 3.0)  # the store that the others learn it from lives here, not in a launcher
        os._exit(1)  # as an uncaught exception does; it closes the connections that the others wait on


def test_an_error_in_one_replica_ends_the_others_with_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        pool(4).run(fails_in_one_replica, str(tmp_path), timeout=90.0)
    message = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert message[2].startswith("KeyError") and "sample 6 is broken" in message[2]
    for text in (message[0], message[1], message[3]):
        assert text.startswith("PeerFailure: rank 2") and "sample 6 is broken" in text


def test_a_replica_of_one_rank_sends_nothing() -> None:
    rows = [{"x": 1}]
    assert replica_groups(ParallelLayout(1)) is None
    iterator = replica_batches(lambda: rows, None)
    assert type(iterator) is type(iter(rows))
    assert next(iterator) is rows[0]

"""Each rank of a replica gets its shard of a micro-batch: what arrives, what stays, and that training is the same."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.data.replica import replica_batches
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.data.sharded_batch import BatchFacts, BatchSharder, ShardedBatch, whole_batch
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.loss_computation import LossComputation
from tests.data.test_sequence_sharding import sharder_for
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

TOKENS = 10_000_000


def rows(length: int, count: int) -> Any:
    yield from map(partial(row, length), range(count))  # holds none of them


def row(length: int, index: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(index, length + index).remainder_(50).unsqueeze(0)
    return {"input_ids": tokens, "labels": tokens.clone()}


def alive() -> int:
    """Bytes of all storages of at least a megabyte that Python can reach."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in found.values() if size >= 2**20)


def read(layout: ParallelLayout, length: int, count: int, cut: bool) -> dict[str, Any]:
    """Read ``count`` batches; what is alive with each, what is copied to the device, and the last batch."""
    groups = parallel_groups(layout)
    sharder = sharder_for(layout)
    describe = lambda batch: BatchFacts(batch["labels"].ne(-100).sum(), None)  # noqa: E731
    batches = BatchSharder(sharder, describe, partial(sharder.beginning, tokens=4096))
    held, to_device, last = [], [], None
    source = partial(rows, length, count)
    for batch in replica_batches(source, groups, sharder=batches if cut else None):
        last = batch
        held.append(alive())
        local = batch.local if cut else sharder.shard(batch, groups.coordinates.cp, groups.coordinates.sp)[0]
        to_device.append(sum(value.numel() * value.element_size() for value in local.values()))
        del local
        items = int(batch.facts.items) if cut else int(describe(batch).items)
        assert items == length
    assert last is not None
    if cut and length < 10**6:
        whole, wanted = whole_batch(last, groups), row(length, count - 1)
        assert torch.equal(whole["input_ids"], wanted["input_ids"])
        assert torch.equal(whole["labels"][:, 1:], wanted["labels"][:, 1:])
    return {"held": max(held), "to_device": max(to_device)}


def test_ten_million_tokens() -> None:
    """Whole batches have 16 bytes a token. A rank keeps 24 of each of its own: tokens, targets, positions."""
    layout = ParallelLayout(2, cp=2)
    for found in pool(2).run(partial(read, layout, TOKENS, 1, True)):
        assert found["held"] < 1.1 * 24 * TOKENS / 2, found
        assert found["to_device"] == 32 * TOKENS / 2
    for found in pool(2).run(partial(read, layout, 10**6, 1, False)):  # the control: whole batches
        assert found["held"] >= 16 * 10**6, found


def test_a_batch_can_be_put_together_again() -> None:
    """For the file of a step that diverged."""
    pool(4).run(partial(read, ParallelLayout(4, cp=2, tp=2), 4001, 2, True))


LAYOUTS: dict[str, Any] = {
    "ring": (2, dict(context_parallel_size=2)),
    "ring, Ulysses, two replicas": (8, dict(context_parallel_size=2, sequence_parallel_size=2, zero_stage=3)),
    "Ulysses, tensor parallelism": (4, dict(sequence_parallel_size=2, tensor_parallel_size=2)),
}


def trained(cut: list[bool], *arguments: Any, **keywords: Any) -> Any:
    """:func:`train_and_report`; notes for each micro-batch whether it came in shards."""
    sharded = LossComputation.sharded

    def noting(losses: LossComputation, inputs: Any, *rest: Any) -> Any:
        cut.append(isinstance(inputs, ShardedBatch))
        return sharded(losses, inputs, *rest)

    LossComputation.sharded = noting  # type: ignore[method-assign]
    try:
        report = train_and_report(*arguments, **keywords)
    finally:
        LossComputation.sharded = sharded  # type: ignore[method-assign]
    return report, cut


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_on_shards_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    world, sizes = LAYOUTS[name]
    make_data = partial(RaggedTokens, 37)
    wanted = train_plainly(tiny_llama(), make_data(), learning_rate=2e-3)
    more = {"learning_rate": 2e-3, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2, **sizes}
    replicas = 2 if world == 8 else 1
    job = partial(trained, [], tiny_llama, make_data, str(tmp_path), per_device_train_batch_size=8 // replicas, **more)
    for found, cut in pool(world).run(job):
        assert_equal(found, wanted, tolerance=3e-5)
        assert len(cut) == 7 and all(cut)


class LaterLabels(SequenceSharder):
    """Broken on purpose: the targets of a shard are those of the whole batch, one token late."""

    def _part(self, key: str, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super()._part(key, value, positions - 1 if key == "labels" else positions)


def broken(*arguments: Any, **keywords: Any) -> Any:
    shards = BatchSharder.shards

    def wrong(sharder: BatchSharder, batch: Any, groups: Any) -> Any:
        sharder._sharder.__class__ = LaterLabels
        yield from shards(sharder, batch, groups)

    BatchSharder.shards = wrong  # type: ignore[method-assign]
    try:
        return trained(*arguments, **keywords)
    finally:
        BatchSharder.shards = shards  # type: ignore[method-assign]


def test_wrong_shards_are_noticed(tmp_path: Path) -> None:
    make_data = partial(RaggedTokens, 37)
    wanted = train_plainly(tiny_llama(), make_data(), learning_rate=2e-3)
    more = {"learning_rate": 2e-3, "max_grad_norm": 0.0, "context_parallel_size": 2}
    job = partial(broken, [], tiny_llama, make_data, str(tmp_path), per_device_train_batch_size=16, **more)
    for found, _ in pool(2).run(job):
        with pytest.raises(AssertionError):
            assert_equal(found, wanted, tolerance=3e-5)


class OverridesFetching(Trainer):
    def get_batch_samples(self, *arguments: Any) -> Any:
        return super().get_batch_samples(*arguments)


def test_a_method_that_may_read_batches_gets_whole_ones(tmp_path: Path) -> None:
    job = partial(trained, [], tiny_llama, partial(RaggedTokens, 37), str(tmp_path), OverridesFetching, max_steps=2)
    for _, cut in pool(2).run(partial(job, per_device_train_batch_size=4, context_parallel_size=2)):
        assert cut and not any(cut)

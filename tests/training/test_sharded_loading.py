"""Each rank of a replica gets its shard of a micro-batch: what arrives, what stays, and that training is the same."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data.replica import replica_batches
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.data.sharded_batch import BatchFacts, BatchSharder, ShardedBatch, whole_batch
from ds_trainer.data.stream import StreamLoader, StreamShard
from ds_trainer.parallel.attention_blocks import BlockKind, attention_blocks
from ds_trainer.parallel.batch_plan import BatchPlan
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


DOCUMENTS = 1000


def rows(length: int, count: int, packed: bool = False) -> Any:
    yield from map(partial(row, length, packed=packed), range(count))  # holds none of them


def row(length: int, index: int, packed: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.arange(index, length + index).remainder_(50).unsqueeze(0)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if packed:
        batch["position_ids"] = torch.arange(length).remainder_(length // DOCUMENTS).unsqueeze(0)
    return batch


def alive() -> int:
    """Bytes of all storages of at least a megabyte that Python can reach."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in found.values() if size >= 2**20)


def read(layout: ParallelLayout, length: int, count: int, cut: bool, packed: bool = False) -> dict[str, Any]:
    """Read ``count`` batches; what is alive with each, and what is copied to the device."""
    groups = parallel_groups(layout)
    sharder = sharder_for(layout)
    describe = lambda batch: BatchFacts(batch["labels"].ne(-100).sum(), None)  # noqa: E731
    batches = BatchSharder(sharder, describe, partial(sharder.beginning, tokens=4096))
    held, to_device, last = [], [], None
    source = partial(rows, length, count, packed)
    for batch in replica_batches(source, groups, sharder=batches if cut else None):
        last = batch
        held.append(alive())
        local = batch.local if cut else sharder.shard(batch, groups.coordinates.cp, groups.coordinates.sp)[0]
        to_device.append(sum(value.numel() * value.element_size() for value in local.values()))
        del local
        items = int(batch.facts.items) if cut else int(describe(batch).items)
        assert items == length
        if packed and cut:
            assert batch.plan.documents.starts.numel() == batch.plan.documents.numbers.numel() == DOCUMENTS
            blocks = attention_blocks(batch.plan, groups.coordinates.cp, True, window=4)
            masked = next((s, b) for s, of in enumerate(blocks.of) for b in of if b.kind is BlockKind.MASKED)
            blocks.mask(*masked, torch.device("cpu"))
            held.append(alive())
            del blocks  # has the documents, which came with the shard
    assert last is not None
    if cut and length < 10**6:
        whole, wanted = whole_batch(last, groups), row(length, count - 1)
        assert torch.equal(whole["input_ids"], wanted["input_ids"])
        assert torch.equal(whole["labels"][:, 1:], wanted["labels"][:, 1:])
    return {"held": max(held), "to_device": max(to_device)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "a thousand documents"])
def test_ten_million_tokens(packed: bool) -> None:
    """Whole batches have 16 bytes a token. A rank keeps 24 of each of its own: tokens, targets, positions.

    Of the first batch too, and the second.
    """
    layout = ParallelLayout(2, cp=2)
    for found in pool(2).run(partial(read, layout, TOKENS, 2, True, packed)):
        assert found["held"] < 1.01 * 24 * TOKENS / 2, found
        assert found["to_device"] == 32 * TOKENS / 2
    for found in pool(2).run(partial(read, layout, 10**6, 1, False, packed)):  # the control: whole batches
        assert found["held"] >= (24 if packed else 16) * 10**6, found


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Packed rows that are made when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[0] for key, value in row(self.length, index, packed=True).items()}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return map(Rows(self.length).__getitem__, range(2))


class OneWeight(nn.Module):
    """Notes what is alive, and has a loss that is known: the mean token that is a target."""

    held: list[int]
    shifts_labels = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.held = []

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        self.held.append(alive())
        assert shift_labels is not None
        return {"loss": self.weight * (shift_labels.clamp(min=0).sum() / shift_labels.ne(-100).sum())}


def held_in_evaluation(length: int, data: Any, output_dir: str, whole: bool = False) -> dict[str, Any]:
    class Whole(Trainer):
        def prediction_step(self, *arguments: Any, **keywords: Any) -> Any:
            return super().prediction_step(*arguments, **keywords)

    args = TrainingArguments(
        output_dir, use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=1, context_parallel_size=2
    )
    trainer = (Whole if whole else Trainer)(OneWeight(), args, eval_dataset=data(length))
    return {"loss": trainer.evaluate()["eval_loss"], "held": max(trainer.model.held)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("data", [Rows, Stream])
def test_ten_million_tokens_in_an_evaluation(data: Any, tmp_path: Path) -> None:
    """The loop reads one batch ahead, and one of a stream reads several: here there are two batches."""
    for found in pool(2).run(partial(held_in_evaluation, TOKENS, data, str(tmp_path))):
        assert found["held"] < 2 * 1.01 * 24 * TOKENS / 2, found
        assert found["loss"] == pytest.approx(24.5, rel=1e-5)
    for found in pool(2).run(partial(held_in_evaluation, 10**6, data, str(tmp_path), True)):  # the control
        assert found["held"] >= 2 * 24 * 10**6, found
        assert found["loss"] == pytest.approx(24.5, rel=1e-5)


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


@pytest.mark.extended
@pytest.mark.cases(1)
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


def held_of_a_stream() -> list[int]:
    """What is alive while each shard of a stream is in use."""
    layout, length = ParallelLayout(2, cp=2), 10**6
    sharder = sharder_for(layout)
    plan, collate = BatchPlan(layout, 1), lambda samples: {k: v[None] for k, v in samples[0].items()}
    loader = StreamLoader(StreamShard(Stream(length), plan, 0, collate), window=1)
    describe = lambda batch: BatchFacts(torch.tensor(0), None)  # noqa: E731
    loader.cut_with(BatchSharder(sharder, describe, partial(sharder.beginning, tokens=4096)))
    return [alive() for _ in loader]


def test_nothing_of_a_stream_holds_a_whole_batch() -> None:
    parallel = pool(2).run(held_of_a_stream)
    assert all(size < 1.01 * 24 * 10**6 / 2 for held in parallel for size in held), parallel
    assert [len(held) for held in parallel] == [2, 2]

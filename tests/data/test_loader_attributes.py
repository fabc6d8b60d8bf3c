"""What scripts read on the loaders of the Trainer: the attributes of torch's and of accelerate's loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ds_trainer import ConfigError, Trainer, TrainingArguments, default_data_collator
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.lengths import BalancedBatchSampler
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from tests.support.models import tiny_llama

ROWS = [{"input_ids": [n, n + 1, n + 2], "labels": [n, n + 1, n + 2]} for n in range(10)]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The rows, without positions."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


class Reader:
    """The rows, from an object that torch does not know."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def trainer(directory: Path, data: Any, **changes: Any) -> Trainer:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "max_steps": 2,
        "use_cpu": True,
        "save_strategy": "no",
    }
    args = TrainingArguments(str(directory), **{**values, **changes})
    return Trainer(tiny_llama(), args, default_data_collator, data, data)


def loaders(one: Trainer, data: Any) -> list[tuple[Any, int]]:
    """The loaders of training, evaluation and prediction, with their micro-batches."""
    return [(one.get_train_dataloader(), 4), (one.get_eval_dataloader(), 3), (one.get_test_dataloader(data), 3)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [ROWS, Stream(), Reader()], ids=["rows", "stream", "reader"])
def test_the_dataset_is_that_of_the_user(data: Any, workers: int, tmp_path: Path) -> None:
    options = {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3} if workers else {}
    one = trainer(tmp_path, data, dataloader_num_workers=workers, remove_unused_columns=False, **options)
    for loader, micro_batch in loaders(one, data):
        assert isinstance(loader, DataLoader) and loader.dataset is data
        assert loader.collate_fn is one.data_collator is default_data_collator
        assert loader.num_workers == workers and loader.prefetch_factor == (3 if workers else None)
        assert loader.persistent_workers is bool(workers)
        assert (loader.batch_size, loader.total_batch_size) == (micro_batch, micro_batch)
        assert loader.pin_memory is False and loader.drop_last is False
        assert sum(len(batch["labels"]) for batch in loader) == 10
        if hasattr(data, "__len__"):
            assert len(loader) == -(-10 // micro_batch) and one.num_examples(loader) == 10


def test_columns_that_are_not_removed_leave_a_table_as_it_is(tmp_path: Path) -> None:
    from datasets import Dataset

    table = Dataset.from_list(ROWS)
    one = trainer(tmp_path, table)
    assert all(loader.dataset is table for loader, _ in loaders(one, table))


@pytest.mark.extended
def test_dropping_the_last_micro_step_shows(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, dataloader_drop_last=True)
    loader = one.get_train_dataloader()
    assert loader.drop_last is True and loader.batch_sampler.drop_last is True
    assert len(loader) == len(loader.batch_sampler) == 2 and len(loader.sampler) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_sampler_and_sampler_give_the_positions_that_are_read(workers: int, tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, dataloader_num_workers=workers)
    for loader, micro_batch in loaders(one, ROWS):
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            read = [batch["input_ids"][:, 0].tolist() for batch in loader]
            assert list(loader.batch_sampler) == read
            assert list(loader.sampler) == [position for batch in read for position in batch]
        assert len(loader.batch_sampler) == len(read) and len(loader.sampler) == 10
        assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (micro_batch, False)
        assert list(loader.batch_sampler.sampler) == list(loader.sampler)
    train = one.get_train_dataloader()
    first = list(train.sampler)
    train.sampler.set_epoch(1)
    assert list(train.sampler) != first and sorted(train.sampler) == sorted(first)


@pytest.mark.parametrize("balanced", [False, True])
def test_each_replica_shows_its_own_part(balanced: bool) -> None:
    plan = BatchPlan(ParallelLayout(3), 2, accumulation=2)
    together: list[int] = []
    for rank in range(3):
        lengths = list(range(1, 14))
        sampler = (
            BalancedBatchSampler(plan, lengths, rank) if balanced else DistributedBatchSampler(plan, len(lengths), rank)
        )
        loader = PlannedLoader(lengths, sampler, torch.tensor)  # type: ignore[arg-type]
        assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (2, 6, 13)
        assert len(list(loader.batch_sampler)) == len(loader) == 3  # type: ignore[arg-type]
        assert len(loader.sampler) == len(list(loader.sampler))  # type: ignore[arg-type]
        together += loader.sampler
    assert sorted(together) == list(range(13))  # the padding of the last micro-step is in no sampler


def with_a_note(rows: list[Any]) -> dict[str, Any]:
    return {**default_data_collator(rows), "note": len(rows)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [ROWS, Stream()], ids=["rows", "stream"])
def test_a_collator_set_on_the_loader_is_used(data: Any, workers: int, tmp_path: Path) -> None:
    one = trainer(tmp_path, data, dataloader_num_workers=workers)
    for loader, _ in loaders(one, data):
        loader.collate_fn = with_a_note
        assert sum(batch["note"] for batch in loader) == 10


def test_accelerator_methods_know_the_loaders_of_the_trainer(tmp_path: Path) -> None:
    for data in (ROWS, Stream()):
        one = trainer(tmp_path, data)
        for loader, _ in loaders(one, data):
            assert one.accelerator.prepare(loader) is loader
            with pytest.raises(ConfigError, match=r"loader.start\(epoch, first_sample\)"):
                one.accelerator.skip_first_batches(loader, 1)


def test_dummy_batches_are_read_but_not_shown() -> None:
    plan, shown = BatchPlan(ParallelLayout(3), 1), []
    for rank in range(3):
        loader = PlannedLoader([5, 6], DistributedBatchSampler(plan, 2, rank), as_batch)  # type: ignore[arg-type]
        (only,) = loader
        positions: list[int] = list(loader.sampler)
        assert (positions == []) == isinstance(only, DummyBatch)
        shown += positions
    assert sorted(shown) == [0, 1]


def as_batch(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(rows)}

"""A prepared dataset in a Trainer and in a job of several ranks."""

from __future__ import annotations

import datetime
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data.collators import default_data_collator
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.once import Waiting
from ds_trainer.samples.prepared.prepare import prepare
from tests.samples.prepared.conversations import IDENTITY, Encode, parts_of, write_conversations
from tests.support.file_access import opened
from tests.support.models import tiny_llama

FORK = multiprocessing.get_context("fork")
WAYS: dict[str, dict[str, Any]] = {
    "packing": {"packing": True, "max_length": 64},
    "group_by_length": {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("training")
    paths = write_conversations(root / "source")
    values = {"identity": IDENTITY, "vocab_size": 200, "processes": 1}
    return prepare(parts_of(paths), Encode(), root / "out", files=paths, **values).directory


def loader_of(dataset: Any, output: Path, arguments: dict[str, Any]) -> Any:
    collate = {} if arguments.get("packing") else {"data_collator": default_data_collator}
    args = TrainingArguments(str(output), report_to="none", use_cpu=True, **arguments)
    return Trainer(tiny_llama(vocab_size=256), args, train_dataset=dataset, **collate).get_train_dataloader()


@pytest.mark.parametrize("way", WAYS)
def test_the_order_is_made_without_reading_a_token(directory: Path, tmp_path: Path, way: str) -> None:
    """And it is that of the same samples in memory."""
    dataset = PreparedDataset(directory)
    with opened(directory) as files:
        loader = loader_of(dataset, tmp_path, WAYS[way])
        assert len(loader) > 3
    assert files in (["lengths"], [])
    if way == "packing":
        assert files == ["lengths"]
    in_memory = loader_of([dataset[index] for index in range(len(dataset))], tmp_path, WAYS[way])
    for batch, other in zip(loader, in_memory, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def rank(number: int, root: Path, seconds: float, answers: Any) -> None:
    """A rank whose collectives may take ``seconds``: prepares, then sums something over the ranks."""
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=datetime.timedelta(seconds=seconds))
    paths = sorted((root / "source").iterdir())
    dataset = prepare(
        parts_of(paths),
        Encode(seconds=0.05),
        root / "out",
        files=paths,
        identity=IDENTITY,
        vocab_size=200,
        processes=1,
        waiting=Waiting(poll=0.05, head_start=0.0),
    )
    total = torch.tensor([dataset.report is not None, len(dataset)], dtype=torch.int64)
    dist.all_reduce(total)
    answers.put(total.tolist())
    dist.destroy_process_group()


def test_ranks_wait_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    write_conversations(tmp_path / "source", files=1, lines=100)  # five seconds to encode
    answers = FORK.SimpleQueue()
    ranks = [FORK.Process(target=rank, args=(number, tmp_path, 2.5, answers), daemon=True) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [answers.get() for _ in ranks] == [[1, 200], [1, 200]]  # one wrote, both have all samples

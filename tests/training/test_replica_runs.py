"""Training on data that differs on every rank: the ranks of a replica agree in every step, not only in the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data import loader as loader_module
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

STEPS = 4


class UnsteadyLater(RaggedTokens):
    """Equal on all ranks for as long as DeepSpeed looks, the first forward pass; every rank's own after that."""

    def __init__(self, rank: int, steady: int) -> None:
        super().__init__(64)
        self.noise = torch.Generator().manual_seed(100 + rank)
        self.steady = steady

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        self.steady -= 1
        if self.steady >= 0:
            return row
        tokens = torch.randint(3, 61, row["input_ids"].shape, generator=self.noise) * row["attention_mask"]
        return {**row, "input_ids": tokens, "labels": torch.where(row["labels"] == -100, -100, tokens)}


@contextmanager
def all_ranks_read() -> Iterator[None]:
    kept = loader_module.replica_groups
    loader_module.replica_groups = lambda layout: None
    try:
        yield
    finally:
        loader_module.replica_groups = kept


def train(output_dir: str, alone: bool, sizes: dict[str, int]) -> tuple[list[list[int]], dict[str, list[float]], int]:
    args = TrainingArguments(
        output_dir,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        zero_stage=1,
        **sizes,  # type: ignore[arg-type]
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=UnsteadyLater(args.process_index, steady=4))
    seen: list[list[int]] = []
    fetch = trainer.get_batch_samples

    def watched(*given: Any) -> Any:
        batches, items = fetch(*given)
        seen.extend(batch["input_ids"].flatten().tolist() for batch in batches)
        return batches, items

    trainer.get_batch_samples = watched  # type: ignore[method-assign]
    if alone:
        with all_ranks_read():
            trainer.train()
    else:
        trainer.train()
    norms = {name: p.detach().tolist() for name, p in trainer.model.named_parameters() if "norm" in name}
    calls = 4 - trainer.train_dataset.steady
    trainer.engine.close()
    return seen, norms, calls


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}, {"context_parallel_size": 2}], ids=str
)
def test_ranks_of_a_replica_see_equal_batches_in_every_step(sizes: dict[str, int], tmp_path: Path) -> None:
    found = pool(4).run(train, str(tmp_path), False, sizes)
    for one, other in ((0, 1), (2, 3)):
        assert len(found[one][0]) == STEPS
        assert found[one][0] == found[other][0]
        assert found[one][1] == found[other][1]
        assert found[one][2] == 4 * STEPS and found[other][2] == 0  # read once
    for step in range(1, STEPS):
        assert found[0][0][step] != found[2][0][step]


def test_control_deepspeed_alone_lets_replicas_differ(tmp_path: Path) -> None:
    """Negative control: its look at the first batch passes, and weights that are copies of each other drift apart."""
    found = pool(2).run(train, str(tmp_path), True, {"tensor_parallel_size": 2})
    assert found[0][0][0] == found[1][0][0]
    assert found[0][0][1:] != found[1][0][1:]
    assert found[0][1] != found[1][1]

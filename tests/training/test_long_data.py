"""A dataset of a billion samples: trained on, stopped and resumed, at no cost for its length."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from tests.support.pool import pool
from tests.support.resuming import Tokens, differences, run


class Billion(Dataset[Any]):
    """A billion rows: those of a small table, with the number of the row in their first tokens."""

    def __init__(self) -> None:
        self.rows = Tokens().rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        row = dict(self.rows[index % len(self.rows)])
        row["input_ids"] = row["input_ids"].clone()
        row["input_ids"][:3] = torch.tensor([3 + index // 50**digit % 50 for digit in range(3)])
        return row


def counted(output_dir: str, resume: bool | None = None, **arguments: Any) -> tuple[Any, list[int], int]:
    """The record of a run, the rows that were read, and by how many bytes the process has grown."""
    data, before = Billion(), psutil.Process().memory_info().rss
    record = run(output_dir, resume, data=data, **arguments)
    return record, data.read, psutil.Process().memory_info().rss - before


# Instead of the others: the same test, shuffled
@pytest.mark.cases(1)
@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["random", "sequential"])
def test_a_billion_samples_train_and_resume(strategy: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"train_sampling_strategy": strategy, "save_steps": 4}
    seen = {}
    for world in (1, 2, 4):
        path, sizes = str(tmp_path / str(world)), {"per_device_train_batch_size": 4 // world}
        run_ranks = pool(world).run
        uninterrupted = run_ranks(partial(counted, path + "whole", **sizes, **arguments))
        run_ranks(partial(counted, path, stop_at=4, **sizes, **arguments))
        found = run_ranks(partial(counted, path, True, seed=1, **sizes, **arguments))
        for (record, read, grown), (other, all_read, _) in zip(found, uninterrupted, strict=True):
            assert differences(record, other) == []
            assert len(read) < len(all_read)  # nothing is read over
            assert grown < 400 * 2**20  # torch and the engine; an order of int64 would take 8 GB
        micro_batch_loss = 4 // world
        seen[world] = [
            sorted(
                row
                for _, read, _ in uninterrupted
                for row in read[step * micro_batch_loss : (step + 1) * micro_batch_loss]
            )
            for step in range(8)
        ]
    assert seen[1] == seen[2] == seen[4]

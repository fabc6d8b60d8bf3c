"""In a run that gets on: a slow rank is named with its cause; ranks that are alike are not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.monitor.metrics_file import read_records
from ds_trainer.utils import distributed
from tests.monitor.health.hung_runs import arguments
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

PAUSE = 0.15  # of the slow rank, a step


class SlowData(RaggedTokens):
    """Every first sample of a micro-batch takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(128)
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index % 4 == 0:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class SlowLoss(Trainer):
    """The forward pass takes its time."""

    seconds = 0.0

    def compute_loss(self, *args: Any, **keywords: Any) -> Any:
        time.sleep(self.seconds)
        return super().compute_loss(*args, **keywords)


def uneven_run(output_dir: str, data: list[float], work: list[float], stage: int) -> None:
    """Train with these pauses of each rank, in seconds a step."""
    rank = distributed.rank()
    kind = type("Slow", (SlowLoss,), {"seconds": work[rank]})
    args = arguments(output_dir, max_steps=12, straggler_steps=4, zero_stage=stage, hang_timeout=0.0)
    trainer = kind(tiny_llama(), args, train_dataset=SlowData(data[rank]))
    trainer.train()
    trainer.engine.close()


def last_windows(tmp_path: Path, data: list[float], work: list[float], stage: int) -> list[dict[str, Any]]:
    pool(2).run(uneven_run, str(tmp_path), data, work, stage)
    records = read_records(tmp_path / "health" / "stragglers.jsonl")
    assert [record["step"] for record in records] == [4, 8, 12]
    return records[1:]  # caches are filled in the first one


def typical(record: dict[str, Any], name: str) -> list[float]:
    values: list[float] = record[f"{name}_seconds"]
    return values


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])  # at stage 3 the others wait in their forward pass already
def test_a_slow_rank_is_named(stage: int, tmp_path: Path) -> None:
    for record in last_windows(tmp_path, [0.0, 0.0], [0.0, PAUSE], stage):
        assert (record["slowest_rank"], record["slowest_cause"], record["notable"]) == (1, "its own work", True)
        assert 0.4 * PAUSE < record["slowest_excess"] < 2 * PAUSE
        assert typical(record, "communication")[0] > 0.5 * PAUSE  # the other one waits for it
        assert typical(record, "work")[1] > PAUSE and max(typical(record, "data")) < 0.5 * PAUSE


def test_slow_data_is_distinguished_from_slow_compute(tmp_path: Path) -> None:
    """Rank 0 has slow data. Rank 1 waits for rank 0, not for data."""
    for record in last_windows(tmp_path, [PAUSE, 0.0], [0.0, 0.0], 1):
        assert (record["slowest_rank"], record["slowest_cause"], record["notable"]) == (0, "data loading", True)
        assert typical(record, "data")[0] > PAUSE > 2 * typical(record, "data")[1]
        assert typical(record, "communication")[1] > 0.5 * PAUSE


def test_equally_slow_ranks_are_not_named(tmp_path: Path) -> None:
    """All wait for data and all work slowly: the same pauses as before, on both ranks."""
    pauses = [2 * PAUSE, 2 * PAUSE]
    records = last_windows(tmp_path, pauses, pauses, 1)
    assert min(record["slowest_excess"] / typical(record, "step")[0] for record in records) < 0.25
    assert min(typical(records[-1], "data")) > 1.9 * PAUSE and min(typical(records[-1], "work")) > 1.9 * PAUSE

"""Saving and exporting a model of about half a GB take less than two files' worth of memory beside what is there."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.checkpoint.weights.weight_files import read_header
from tests.support.memory import MB, peak_of
from tests.support.models import regression_rows
from tests.support.pool import WorkerPool

SHARD = 100 * MB
ROWS, COLUMNS, LAYERS = 4096, 4096, 8  # 8 x 64 MB


class Wide(nn.Module):
    """Half a GB of weights, of which few are trained: gradients and masters of all would be in memory too."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, COLUMNS)
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS))
        self.layers.requires_grad_(False)
        with torch.no_grad():  # the usual random numbers take seconds
            for index, layer in enumerate(self.layers):
                layer.weight.copy_(torch.arange(COLUMNS).add(index).remainder(61).div(1e6).expand(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.into(x)
        prediction = torch.stack([layer(hidden).mean(-1) for layer in self.layers]).sum(0)
        return (prediction - labels).square().mean(), prediction


def weights_of(directory: Path) -> dict[str, list[int]]:
    return {
        name: entry["shape"] for path in directory.glob("*.safetensors") for name, entry in read_header(path).items()
    }


def saved(output_dir: str) -> int:
    """Peak of ``save_model``, in bytes; ``checkpoint-1`` is there afterwards."""
    args = TrainingArguments(
        output_dir,
        max_steps=1,
        per_device_train_batch_size=1,
        zero_stage=3,
        save_strategy="steps",
        save_steps=1,
        max_shard_size=f"{SHARD}B",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Wide(), args, train_dataset=regression_rows(2))
    trainer.train()
    peak = peak_of(lambda: trainer.save_model(f"{output_dir}/live"))
    trainer.engine.close()
    return peak


def exported(output_dir: str) -> int:
    """Peak of the export in a fresh process, in bytes."""
    job: Any = partial(export_checkpoint, Path(output_dir) / "checkpoint-1", Path(output_dir) / "out", SHARD)
    return peak_of(job)


@pytest.mark.extended
@pytest.mark.slow
def test_exporting_half_a_gigabyte_takes_less_memory_than_two_files(tmp_path: Path) -> None:
    ranks = WorkerPool(2)
    try:
        live = ranks.run(saved, str(tmp_path), timeout=400)
    finally:
        ranks.close()
    alone = WorkerPool(1)
    try:
        (offline,) = alone.run(exported, str(tmp_path), timeout=400)
    finally:
        alone.close()
    print(f"peaks in MB: live {[peak // MB for peak in live]}, offline {offline // MB}")
    wanted = weights_of(tmp_path / "live")
    assert len(wanted) == LAYERS + 2 and weights_of(tmp_path / "out") == wanted
    for path in (tmp_path / "live").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    shutil.rmtree(tmp_path)  # 3 GB
    # The measure sees what it should: one of the 128 MB tensors at least was whole.
    assert all(ROWS * COLUMNS * 4 < peak < 2 * SHARD for peak in [*live, offline])

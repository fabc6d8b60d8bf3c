"""Adagrad at every stage: numbers of one plain process, for models on meta too, and bit-identical resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from tests.support.compare import assert_equal
from tests.support.loading import on_meta
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of

make_data = partial(RaggedTokens, 64)
RATE = 1e-2


def run(output_dir: Path, model: Any, checkpoint: str | None = None, **changes: Any) -> Trajectory:
    values: dict[str, Any] = dict(
        optim="adagrad",
        optim_args="lr_decay=0.1",
        learning_rate=RATE,
        weight_decay=0.1,
        max_grad_norm=0.0,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=8,
    )
    job = Trainer(model, TrainingArguments(str(output_dir), **{**values, **changes}), train_dataset=make_data())
    job.train(resume_from_checkpoint=checkpoint)
    found = compatibility_of(job)
    job.engine.close()
    return found


def at_every_stage(output_dir: Path) -> list[tuple[Trajectory, Trajectory, Trajectory]]:
    """On a rank: a full run, one of a model on the meta device, and one that resumes in the middle."""
    found = []
    for stage in (0, 1, 2, 3):
        directory = output_dir / str(stage)
        uninterrupted = run(directory, tiny_llama(), zero_stage=stage, save_strategy="steps", save_steps=2)
        meta = run(directory / "meta", on_meta(tiny_llama()), zero_stage=stage)
        resumed = run(directory, tiny_llama(seed=1), str(directory / "checkpoint-2"), zero_stage=stage)
        found.append((uninterrupted, meta, resumed))
    return found


def plain(model: torch.nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=RATE, lr_decay=0.1)


@pytest.mark.extended
def test_every_stage_trains_like_one_process(tmp_path: Path) -> None:
    wanted = train_plainly(tiny_llama(), make_data(), optimizer=plain, learning_rate=RATE)
    for rank in pool(2).run(at_every_stage, tmp_path, timeout=600):
        for uninterrupted, meta, resumed in rank:
            assert_equal(uninterrupted, wanted, 2e-5)
            assert_equal(meta, wanted, 2e-5)
            assert resumed.losses == uninterrupted.losses
            assert [
                name for name, weight in uninterrupted.weights.items() if not torch.equal(weight, resumed.weights[name])
            ] == []

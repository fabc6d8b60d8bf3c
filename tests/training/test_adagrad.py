"""Adagrad at every stage: numbers of one plain process, for models on meta too, and bit-identical resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_trainer import Trainer, TrainingArguments
from tests.support.compare import assert_equal
from tests.support.loading import on_meta
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import trajectory_of

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
    found = trajectory_of(job)
    job.engine.close()
    return found


def at_every_stage(output_dir: Path) -> list[tuple[Trajectory, Trajectory, Trajectory]]:
    """On a rank: a whole run, one of a model on meta, and one that goes on in the middle."""
    found = []
    for stage in (0, 1, 2, 3):
        place = output_dir / str(stage)
        whole = run(place, tiny_llama(), zero_stage=stage, save_strategy="steps", save_steps=2)
        meta = run(place / "meta", on_meta(tiny_llama()), zero_stage=stage)
        resumed = run(place, tiny_llama(seed=1), str(place / "checkpoint-2"), zero_stage=stage)
        found.append((whole, meta, resumed))
    return found


def plain(model: torch.nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=RATE, lr_decay=0.1)


def test_every_stage_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    wanted = train_plainly(tiny_llama(), make_data(), optimizer=plain, learning_rate=RATE)
    for rank in pool(2).run(at_every_stage, tmp_path, timeout=600):
        for whole, meta, resumed in rank:
            assert_equal(whole, wanted, 2e-5)
            assert_equal(meta, wanted, 2e-5)
            assert resumed.losses == whole.losses
            assert [
                name for name, weight in whole.weights.items() if not torch.equal(weight, resumed.weights[name])
            ] == []

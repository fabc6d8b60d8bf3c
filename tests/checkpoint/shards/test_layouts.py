"""In every layout, weights are saved as one process saves them, and a run resumes bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.parallel.layout import ParallelLayout
from tests.support.layouts import DATA, MODELS, pad
from tests.support.pool import pool
from tests.support.runs import whole_weights

SEQUENCE = ParallelLayout(4, cp=2, sp=2)
TENSOR_AND_SEQUENCE = ParallelLayout(4, tp=2, sp=2)
ALL_AXES = ParallelLayout(8, tp=2, cp=2, sp=2)
CASES = [(SEQUENCE, 0), (SEQUENCE, 3), (TENSOR_AND_SEQUENCE, 2), (TENSOR_AND_SEQUENCE, 3), (ALL_AXES, 1)]
names = [f"{layout.describe()}, ZeRO {stage}" for layout, stage in CASES]


def trainer_of(model: str, output_dir: str, layout: ParallelLayout, stage: int, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        tensor_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel_size=layout.sp,
        zero_stage=stage,
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    return Trainer(MODELS[model](), args, pad, train_dataset=DATA["padded"]())


def digest_of(model: str, output_dir: str, layout: ParallelLayout, stage: int) -> str:
    """Digest of the weight file, after a step that changes nothing."""
    trainer = trainer_of(model, output_dir, layout, stage, max_steps=1, learning_rate=0.0, weight_decay=0.0)
    trainer.train()
    trainer.save_model(f"{output_dir}/saved")
    trainer.engine.close()
    return hashlib.sha256(Path(f"{output_dir}/saved/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "stage"), CASES, ids=names)
@pytest.mark.parametrize("model", ["grouped_query", "tied"])
def test_the_file_matches_that_of_one_process(model: str, layout: ParallelLayout, stage: int, tmp_path: Path) -> None:
    (wanted,) = pool(1).run(digest_of, model, str(tmp_path / "one"), ParallelLayout(1), 0)
    digests = pool(layout.world_size).run(digest_of, model, str(tmp_path / "many"), layout, stage)
    assert set(digests) == {wanted}


def trained(output_dir: str, layout: ParallelLayout, stage: int, stops: list[int]) -> tuple[list[float], Any]:
    """Losses and weights of a run that ends at each of ``stops`` and is resumed there."""
    for count in stops:
        saving: dict[str, Any] = {"max_steps": count, "save_strategy": "steps", "save_steps": 2}
        trainer = trainer_of("grouped_query", output_dir, layout, stage, **saving)
        trainer.train(resume_from_checkpoint=count != stops[0])
        weights = whole_weights(trainer)
        trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "stage"), CASES, ids=names)
def test_a_run_resumes_bit_for_bit(layout: ParallelLayout, stage: int, tmp_path: Path) -> None:
    ranks = pool(layout.world_size)
    straight = ranks.run(trained, str(tmp_path / "straight"), layout, stage, [4])
    resumed = ranks.run(trained, str(tmp_path / "resumed"), layout, stage, [2, 4])
    for (wanted_losses, wanted), (losses, weights) in zip(straight, resumed, strict=True):
        assert losses == wanted_losses
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())

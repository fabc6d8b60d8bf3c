"""A closed engine is let go of: its shards and buffers do not stay in memory while the process lives."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest

from ds_trainer import Trainer
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.predictions import arguments


def train_and_close(output_dir: str, stage: int) -> list[weakref.ref[object]]:
    args = arguments(output_dir, zero_stage=stage, max_steps=2, save_strategy="no")
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(4))
    trainer.train()
    trainer.evaluate()
    engine = trainer.engine.deepspeed
    trainer.engine.close()
    return [weakref.ref(one) for one in (engine, engine.optimizer, engine.module)]


def live_after(output_dir: str, stage: int) -> list[bool]:
    first = train_and_close(output_dir, stage)
    train_and_close(output_dir, stage)  # what belongs to no engine refers to the latest at most
    gc.collect()
    return [one() is not None for one in first]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_closed_engine_frees_its_memory(stage: int, tmp_path: Path) -> None:
    assert pool(2).run(partial(live_after, str(tmp_path), stage)) == [[False] * 3] * 2


def losses_after(output_dir: str, before: str) -> list[float]:
    """Losses of the MLPs of a model with recomputation, after another engine had the same model."""
    model = tiny_llama()
    for name, weight in model.named_parameters():
        weight.requires_grad_("mlp" in name)
    args = arguments(
        output_dir,
        zero_stage=3,
        max_steps=3,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-2,
        activation_checkpointing=True,
    )
    trainer = Trainer(model, args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(4))
    if before == "evaluation":
        trainer.evaluate()
    if before == "training":
        trainer.args.learning_rate = 0.0
        trainer.train()
        trainer.args.learning_rate = 1e-2
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.cases(1)
@pytest.mark.parametrize("before", ["evaluation", "training"])
def test_frozen_layers_are_recomputed_with_the_weights_of_the_present_engine(before: str, tmp_path: Path) -> None:
    alone = pool(2).run(partial(losses_after, str(tmp_path / "alone"), "nothing"))[0]
    assert len(alone) == 3 and alone[2] < alone[0]
    assert pool(2).run(partial(losses_after, str(tmp_path / "after"), before))[0] == pytest.approx(alone, rel=1e-6)

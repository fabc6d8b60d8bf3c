"""Evaluation and prediction under every layout: the loss, the logits and the counts of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.training.evaluation import loss_mean
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import stack, token_loss, train_plainly
from tests.support.pool import pool
from tests.support.predictions import arguments
from tests.support.runs import trajectory_of

SAMPLES = 7  # rounds are ragged, and one replica of two works on a filler at the end
Sizes = tuple[int, int, int]


def accuracy(found: Any) -> dict[str, float]:
    targets = found.label_ids[:, 1:]
    hit = (found.predictions[:, :-1].argmax(-1) == targets) & (targets != -100)
    return {"hits": float(hit.sum()), "rows": float(len(found.predictions))}


def trainer_of(output_dir: str, sizes: Sizes, **changes: Any) -> Trainer:
    """``sizes`` are those of tensor, context and sequence parallelism."""
    names = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_size")
    args = arguments(output_dir, **dict(zip(names, sizes, strict=True)), **changes)
    data = RaggedTokens(16), RaggedTokens(SAMPLES)
    return Trainer(tiny_llama(), args, train_dataset=data[0], eval_dataset=data[1], compute_metrics=accuracy)


def evaluated(output_dir: str, sizes: Sizes, stage: int) -> Any:
    trainer = trainer_of(output_dir, sizes, zero_stage=stage)
    metrics = trainer.evaluate()
    found = trainer.predict(RaggedTokens(SAMPLES))
    held = sum(p.numel() for p in trainer.model.parameters())
    return metrics, found.metrics, found.predictions, found.label_ids, held


def check(results: list[Any]) -> None:
    """Against plain PyTorch in one process, and equal on all ranks to the last bit."""
    data = RaggedTokens(SAMPLES)
    model = tiny_llama().eval()
    batch = stack(data.rows)
    with torch.no_grad():
        loss = token_loss(model, batch).item()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.numpy()
    for metrics, of_predict, predictions, labels, _ in results:
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["eval_items"] == int((batch["labels"][:, 1:] != -100).sum())
        assert metrics["eval_rows"] == SAMPLES == len(predictions)
        assert of_predict["test_loss"] == metrics["eval_loss"] == results[0][0]["eval_loss"]
        assert of_predict["test_hits"] == metrics["eval_hits"] == results[0][0]["eval_hits"]
        np.testing.assert_array_equal(labels, batch["labels"].numpy())
        np.testing.assert_array_equal(predictions, results[0][2])
        np.testing.assert_allclose(predictions, logits, atol=1e-5)


LAYOUTS = {
    "tp 2": (2, (2, 1, 1)),
    "dp 2 x tp 2": (4, (2, 1, 1)),
    "sp 2": (2, (1, 1, 2)),
    "cp 2": (2, (1, 2, 1)),
    "cp 2 x sp 2": (4, (1, 2, 2)),
    "dp 2 x sp 2": (4, (1, 1, 2)),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_before_training(layout: str, stage: int, tmp_path: Path) -> None:
    """The layout is not switched off: with tensor parallelism nobody holds the whole model, at stage 0 neither."""
    world, sizes = LAYOUTS[layout]
    results = pool(world).run(evaluated, str(tmp_path), sizes, stage)
    check(results)
    whole = sum(p.numel() for p in tiny_llama().parameters())
    if sizes[0] > 1:
        assert all(held < whole for *_, held in results)


def counted_twice(output_dir: str, sizes: Sizes) -> Any:
    of_everybody = loss_mean.LossMean.add

    def add(self: Any, *args: Any) -> None:
        self._counts = True
        of_everybody(self, *args)

    loss_mean.LossMean.add = add  # type: ignore[method-assign]
    try:
        return evaluated(output_dir, sizes, 0)
    finally:
        loss_mean.LossMean.add = of_everybody  # type: ignore[method-assign]


def test_a_replica_that_counts_twice_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(pool(2).run(counted_twice, str(tmp_path), (2, 1, 1)))


def around_training(output_dir: str, sizes: Sizes, stage: int, before: bool) -> Any:
    changes: dict[str, Any] = dict(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, max_steps=3)
    trainer = trainer_of(
        output_dir,
        sizes,
        zero_stage=stage,
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        **changes,
    )
    if before:
        trainer.evaluate()
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return trajectory_of(trainer), losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(("stage", "before"), [(0, True), (1, True), (3, True), (3, False)])
def test_evaluation_before_between_and_after_steps_changes_no_weight(stage: int, before: bool, tmp_path: Path) -> None:
    model = tiny_llama()
    wanted = train_plainly(model, RaggedTokens(16), clip=0.5, global_batch=2, steps=3)
    with torch.no_grad():
        after = token_loss(model.eval(), stack(RaggedTokens(SAMPLES).rows)).item()
    for found, losses, last in pool(2).run(around_training, str(tmp_path), (2, 1, 1), stage, before):
        assert_equal(found, wanted)
        assert len(losses) == 3
        assert losses[-1] == pytest.approx(after, rel=1e-5) and last == losses[-1]

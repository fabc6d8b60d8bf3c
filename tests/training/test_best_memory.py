"""The best model is loaded without a second full copy in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.checkpoint.shards.shard_file import ShardFile
from ds_trainer.training.resume.checkpointer import Checkpointer
from tests.support.memory import peak_of
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import WorkerPool
from tests.support.predictions import arguments

large_llama = partial(tiny_llama, hidden_size=512, intermediate_size=1024, head_dim=128)
SHARDED = {"zero 3": {"zero_stage": 3}, "tp 2": {"zero_stage": 0, "tensor_parallel_size": 2}}


class Falling:
    """The first evaluation is the best one."""

    def __init__(self) -> None:
        self.score = 0.0

    def __call__(self, found: Any) -> dict[str, float]:
        self.score -= 1
        return {"score": self.score}


def kept_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of what this rank holds of the weights."""
    return [getattr(p, "ds_tensor", p).detach().clone() for p in trainer.model.parameters()]


def train(output_dir: str, **changes: Any) -> tuple[float, bool, bool]:
    """Peak of loading the best model, in sizes of the model; are the weights those of the best step, of the last?"""
    args = arguments(
        output_dir,
        optim="sgd",  # without state of its own: what is loaded are weights
        learning_rate=0.1,
        max_steps=2,
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        **{
            "save_strategy": "best",
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            **changes,
        },
    )
    model = large_llama()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    trainer = Trainer(
        model, args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(2), compute_metrics=Falling()
    )
    weights: dict[int, list[torch.Tensor]] = {}
    evaluate, keep_best, peaks = trainer.evaluate, Checkpointer.keep_best, []

    def note(*given: Any, **named: Any) -> Any:
        weights[trainer.state.global_step] = kept_tensors(trainer)
        return evaluate(*given, **named)

    trainer.evaluate = note  # type: ignore[method-assign]
    measured = lambda checkpointer: peaks.append(peak_of(lambda: keep_best(checkpointer)))  # noqa: E731
    with mock.patch.object(Checkpointer, "keep_best", measured):
        trainer.train()
    end = kept_tensors(trainer)
    alike = [all(map(torch.equal, end, weights[step])) for step in (1, 2)]
    trainer.engine.close()
    return peaks[0] / size, alike[0], alike[1]


def train_and_keep(output_dir: str) -> tuple[float, bool, bool]:
    """The same, but every shard that is read stays in memory."""
    kept, read = [], ShardFile.tensor

    def tensor(self: ShardFile, key: str) -> torch.Tensor:
        kept.append(read(self, key).clone())
        return kept[-1]

    ShardFile.tensor = tensor  # type: ignore[method-assign]  # this rank ends with the test
    return train(output_dir, zero_stage=0)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [*SHARDED, "whole"])
def test_the_best_model_is_loaded_in_parts(way: str, tmp_path: Path) -> None:
    """A rank reads shard by shard. If these are kept, the same measurement sees a full copy."""
    fresh = WorkerPool(2)
    job = partial(train, str(tmp_path), **SHARDED[way]) if way in SHARDED else partial(train_and_keep, str(tmp_path))
    found = fresh.run(job)
    fresh.close()
    for peak, best, last in found:
        assert (best, last) == (True, False)
        assert peak > 0.9 if way == "whole" else peak < 0.75, found

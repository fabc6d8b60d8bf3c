"""A step in which memory runs out is run again in smaller micro-batches, on all ranks, with the same result.

Memory is bounded by a module that refuses more than so many samples from some step on, as an allocator does: on one rank
only, in the forward or in the backward pass, in the first or the last micro-batch of a step.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.loop.batch_splitting import NotSplittable, split_batch
from ds_trainer.training.out_of_memory import OutOfMemory
from ds_trainer.utils import distributed
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of
from tests.training.startup.test_batch_size_search import OutOfMemoryAbove

STEPS, SHORT_FROM = 5, 3


class Bounded(nn.Module):
    """A language model that from pass ``short_from`` on, counted from 1, holds ``limit`` samples on rank ``rank``."""

    def __init__(self, limit: int, short_from: int, rank: int = 0, backward: bool = False, dropout: float = 0) -> None:
        super().__init__()
        self.model = tiny_llama(num_hidden_layers=3, attention_dropout=dropout)
        self.limit, self.short_from, self.rank, self.short = limit, short_from, rank, backward
        self.passes = 0
        self.model.model.layers[1].register_forward_hook(self._bounded)
        self.loss_type = self.model.loss_type

    def _bounded(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        short = distributed.rank() == self.rank and self.passes >= self.short_from
        hidden = OutOfMemoryAbove.apply(hidden, self.limit if short else 10**6, self.short)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        self.passes += 1
        return self.model(**inputs, num_items_in_batch=num_items_in_batch)


def trainer_of(directory: str, model: nn.Module, callbacks: Any = (), data: Any = None, **changes: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim="sgd",  # Adam enlarges rounding where a gradient is almost zero
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        auto_find_batch_size=True,
    )
    args = TrainingArguments(directory, **{**values, **changes})
    return Trainer(model, args, train_dataset=data or RaggedTokens(40), callbacks=list(callbacks))


class Substeps(TrainerCallback):
    """Counts the micro-batches that each step was at last made of."""

    def __init__(self) -> None:
        self.count, self.found = 1, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.count = 1

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(self.count)


def train(directory: str, limit: int, model: dict[str, Any] | None = None, **changes: Any) -> tuple[Trajectory, Any]:
    """Train; the trajectory, and what micro-batch and accumulation it came to."""
    # The rehearsal before the training is two passes.
    before = (
        0 if not changes.get("auto_find_batch_size", True) else min(2, changes.get("gradient_accumulation_steps", 1))
    )
    per_step = changes.get("gradient_accumulation_steps", 1)
    options = dict(model or {})
    last = options.pop("last", False)
    short_from = before + (SHORT_FROM - 1) * per_step + (per_step if last else 1)
    substeps = Substeps()
    trainer = trainer_of(directory, Bounded(limit, short_from, **options), [substeps], **changes)
    trainer.train()
    report = compatibility_of(trainer)
    facts = {
        "micro": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "total": trainer.get_total_train_batch_size(trainer.args),
        "state": trainer.state.train_batch_size,
        "steps": trainer.state.global_step,
        "engine steps": (trainer.engine.deepspeed.global_steps, trainer.engine.deepspeed.skipped_steps),
        "current": trainer.current_gradient_accumulation_steps,
    }
    trainer.engine.close()
    return report, facts


def equal_where_it_ends(stage: int, ranks: int, accumulation: int, model: dict[str, Any], tmp_path: Path) -> None:
    """With and without memory for 4 samples: the same losses, norms and weights."""
    common = {"zero_stage": stage, "gradient_accumulation_steps": accumulation}
    free = pool(ranks).run(_with, (str(tmp_path / "free"), 4), common) if ranks > 1 else None
    free = free or [train(str(tmp_path / "free"), 4, **common)]
    arguments = (str(tmp_path / "short"), 2, model)
    short = pool(ranks).run(_with, arguments, common) if ranks > 1 else [train(*arguments, **common)]
    for report, facts in short:
        assert facts == {
            "micro": 2,
            "accumulation": 2 * accumulation,
            "total": 4 * accumulation * ranks,
            "state": 2,
            "steps": STEPS,
            "engine steps": (STEPS, 0),
            "current": 2 * accumulation,
        }
        assert_equal(report, free[0][0])


def _with(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return train(*arguments, **keywords)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_of_which_one_is_short_of_memory(stage: int, backward: bool, tmp_path: Path) -> None:
    equal_where_it_ends(stage, 2, 1, {"rank": 1, "backward": backward}, tmp_path)

"""Micro-batches that begin anew on the rank that ran out of memory, while the other ranks compute theirs.

With several passes in a micro-batch, modules that are new, a loss that is being measured, a script that communicates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import PeerFailure, Trainer, TrainingArguments
from ds_trainer.training.out_of_memory import OutOfMemory
from ds_trainer.utils import distributed
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens
from tests.support.oracle import Trajectory
from tests.support.pool import RankFailure, pool
from tests.support.runs import compatibility_of
from tests.training.loop.test_memory_recovery import SHORT_FROM, STEPS, Bounded, trainer_of


class TwoPasses(Trainer):
    """Calls the model twice in each micro-batch; from step 3 on a further module computes a part of the loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        further = self.state.global_step >= SHORT_FROM - 1
        losses = [model(**inputs, further=further, num_items_in_batch=num_items_in_batch) for _ in range(2)]
        return sum(losses)


class Further(Bounded):
    """See :class:`TwoPasses`."""

    def __init__(self, limit: int, short_from: int, rank: int = 0, backward: bool = False) -> None:
        super().__init__(limit, short_from, rank, backward)
        self.further = nn.Linear(61, 61)
        self.calls = 0

    def forward(self, num_items_in_batch: Any = None, further: bool = False, **inputs: Any) -> Any:
        self.calls += further
        self.passes = self.calls - 1
        outputs = super().forward(num_items_in_batch, **inputs)
        if not further:
            return outputs.loss
        return outputs.loss + self.further(outputs.logits).pow(2).sum() / num_items_in_batch / 100


def train_two_passes(directory: str, short_from: int, backward: bool) -> Trajectory:
    model = Further(2, short_from, 1, backward)
    data = RaggedTokens(4 * 2 * STEPS)
    values: dict[str, Any] = dict(max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", learning_rate=0.1)
    values |= dict(logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True, auto_find_batch_size=True)
    values |= dict(remove_unused_columns=False)
    trainer = TwoPasses(model, TrainingArguments(directory, zero_stage=3, **values), train_dataset=data)
    trainer.train()
    assert trainer.args.per_device_train_batch_size == (2 if short_from < 100 else 4)
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report


@pytest.mark.cases("2-True")
@pytest.mark.parametrize(("passes", "backward"), [(1, False), (2, True)])
def test_while_ranks_agree_on_modules_that_are_new(passes: int, backward: bool, tmp_path: Path) -> None:
    """In the first or second pass of the micro-batch in which all ranks call a module for the first time."""
    free, _ = pool(2).run(train_two_passes, str(tmp_path / "free"), 10**6, False)
    for report in pool(2).run(train_two_passes, str(tmp_path / "short"), passes, backward):
        assert_equal(report, free)


class OfSamples(Bounded):
    """A loss that does not use the count, so that it is measured."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.passes += 1
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class Mean(OfSamples):
    """Counts the passes of which a backward pass may follow."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.passes -= not torch.is_grad_enabled()
        return super().forward(input_ids, attention_mask, labels)


class AnyKeywords(Mean):
    """Takes the count, and returns a mean all the same, as most classifiers do."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **keywords: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels)


class Scaled(Trainer):
    """Multiplies by the number of ranks, over which transformers averages."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return sum_of_items(model(**inputs), inputs["labels"], num_items_in_batch) * self.accelerator.num_processes


def sum_of_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def train_first_losses(
    directory: str, kind: str, stage: int, limit: int, given: dict[str, Any]
) -> tuple[Trajectory, int]:
    data: Any = RaggedTokens(4 * 2 * 2 * STEPS)
    if kind == "ambiguous":  # samples with as many items tell nothing, so it is measured again in later steps
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in data]
    trainer_class, model_class = Scaled if kind == "scaled" else Trainer, AnyKeywords if kind == "any" else Mean
    own = {"compute_loss_func": sum_of_items} if kind == "checked" else {}
    settings = dict(zero_stage=stage, gradient_accumulation_steps=2, max_steps=STEPS)
    args = trainer_of(directory, Bounded(4, 1), **settings).args
    trainer = trainer_class(model_class(limit, **given), args, train_dataset=data, **own)
    trainer.train()
    return compatibility_of(trainer), trainer.args.per_device_train_batch_size


@pytest.mark.cases(1, "3-3-mean", "3-4-any", "1-3-scaled", rest="extended")
@pytest.mark.parametrize("kind", ["mean", "any", "scaled", "checked", "ambiguous"])
@pytest.mark.parametrize("short_from", [3, 4, 5])  # the rehearsal is two passes
@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_ranks_compute_once_is_not_begun_anew(stage: int, short_from: int, kind: str, tmp_path: Path) -> None:
    """The backward pass of the micro-batch with which all of them have found out what the loss is, or the next one."""
    given = dict(short_from=short_from, rank=1, backward=True)
    (free, _), _ = pool(2).run(train_first_losses, str(tmp_path / "free"), kind, stage, 4, given)
    for report, rows in pool(2).run(train_first_losses, str(tmp_path / "short"), kind, stage, 2, given, timeout=60):
        assert rows == 2
        assert_equal(report, free)


class Gathers(Trainer):
    """Communicates in each micro-batch, as trainers of other libraries do for their metrics."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        self.metric = self.accelerator.gather(loss.detach()).mean()
        return loss


def out_of_memory_in_a_script_that_gathers(directory: str, stage: int) -> str:
    args = trainer_of(directory, Bounded(4, 1), zero_stage=stage).args
    model = Bounded(2, 3, rank=1, backward=True)
    try:
        Gathers(model, args, train_dataset=RaggedTokens(40)).train()
    except (OutOfMemory, PeerFailure) as error:
        return str(error)
    return "trained"


@pytest.mark.cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_micro_batch_in_which_the_script_communicates_is_not_begun_anew(stage: int, tmp_path: Path) -> None:
    """The others would wait for ever for collectives that this rank has done already."""
    with pytest.raises(RankFailure) as failure:
        texts = pool(2).run(out_of_memory_in_a_script_that_gathers, str(tmp_path), stage, timeout=60)
        raise RankFailure("\n".join(texts))
    assert "no answer" not in str(failure.value) and "trained" not in str(failure.value)


def out_of_memory_in_a_measurement(directory: str, stage: int) -> Any:
    rank = distributed.rank()
    trainer = trainer_of(directory, OfSamples(2, 2, rank=rank if stage == 3 else 1), zero_stage=stage)
    try:
        trainer.train()
    except (OutOfMemory, PeerFailure) as error:
        return str(error)
    return trainer.args.per_device_train_batch_size, trainer._ds_trainer.losses.rule.weighting.settled


def test_memory_that_runs_out_while_the_loss_is_measured(tmp_path: Path) -> None:
    assert pool(2).run(out_of_memory_in_a_measurement, str(tmp_path), 1) == [(2, True)] * 2
    for text in pool(2).run(out_of_memory_in_a_measurement, str(tmp_path), 3):
        assert "the loss was being measured" in text and "--per_device_train_batch_size 2" in text

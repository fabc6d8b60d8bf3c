"""Auxiliary losses of models and custom losses: which are weighted by the Trainer, and which are reported."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import Trainer
from tests.support.compare import assert_equal
from tests.support.experts import COEFFICIENT, OwnExperts, mixtral, weighted_means
from tests.support.models import tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.training.loop.test_auxiliary_loss import FOUR, SGD, make_data, reference, run


@pytest.mark.cases(1)
@pytest.mark.parametrize(("shows", "declared"), [(True, None), (False, True), (True, True)])
def test_a_custom_model_with_an_auxiliary_loss(shows: bool, declared: bool | None, tmp_path: Any) -> None:
    """It shows the term among its outputs, or says that there is one."""
    make_model = partial(OwnExperts, shows, declared)
    loss = partial(weighted_means, micro=2)
    wanted = train_plainly(make_model(), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    for stage in (2, 3):
        for found in run(tmp_path, 2, make_model, **{**FOUR, "zero_stage": stage}):
            assert_equal(found, wanted)


def test_finding_the_auxiliary_term_draws_no_random_numbers(tmp_path: Any) -> None:
    """The first micro-batch is computed twice, with the same dropout: bit for bit what a declared model gives."""
    found, declared = (
        run(tmp_path, 2, partial(OwnExperts, True, declaration, dropout=0.2), **FOUR)[0] for declaration in (None, True)
    )
    assert found.losses == declared.losses and found.grad_norms == declared.grad_norms


class CallsOurs(Trainer):
    """Adds nothing, and hands the count on."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        assert outputs.aux_loss is not None
        return (loss, outputs) if return_outputs else loss


class CallsOursWithoutTheCount(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class OwnStep(Trainer):
    """A training step as those written for transformers: the loss is averaged over the ranks by the backward pass."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss, scale_wrt_gas=False)
        return loss.detach()


class WeighsByItself(Trainer):
    """A custom loss that weights the term by the items of the micro-batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        targets = labels[:, 1:]
        total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        auxiliary = COEFFICIENT * outputs.aux_loss * targets.ne(-100).sum()
        loss = (total + auxiliary) / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@pytest.mark.cases(2)
@pytest.mark.parametrize("trainer_class", [CallsOurs, CallsOursWithoutTheCount, OwnStep, WeighsByItself])
def test_hooks_of_a_subclass_weight_the_auxiliary_term(trainer_class: type[Trainer], tmp_path: Any) -> None:
    for found in run(tmp_path, 2, trainer_class=trainer_class, **FOUR):
        assert_equal(found, reference("mixtral", 2))


def with_function(make_model: Any, output_dir: str, weighted: bool, **arguments: Any) -> Trajectory:
    def loss_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        targets = labels[:, 1:]
        total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        own = targets.ne(-100).sum()
        return total / num_items_in_batch + COEFFICIENT * outputs.aux_loss * (
            own / num_items_in_batch if weighted else 1.0
        )

    class WithFunction(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, compute_loss_func=loss_function)

    return train_and_report(make_model, make_data, output_dir, WithFunction, **arguments)


def test_a_loss_function_may_weight_the_auxiliary_term(tmp_path: Any) -> None:
    for found in pool(2).run(partial(with_function, mixtral, str(tmp_path), True, **SGD, **FOUR)):
        assert_equal(found, reference("mixtral", 2))


def warnings_of(job: Any) -> list[str]:
    """What ``job`` warns of on this rank."""
    from ds_trainer.training.loop import auxiliary_loss

    warnings_seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings_seen.append(record.getMessage())  # type: ignore[method-assign]
    auxiliary_loss.logger.addHandler(handler)
    try:
        job()
    finally:
        auxiliary_loss.logger.removeHandler(handler)
    return warnings_seen


@pytest.mark.parametrize("undivided", [True, False])
def test_an_unweighted_auxiliary_term_is_reported(undivided: bool, tmp_path: Any) -> None:
    """By the derivative of the first micro-batch's loss by the count; of a loss without such a term nothing is said."""
    job = partial(with_function, mixtral, str(tmp_path), not undivided, max_steps=1, **SGD, **FOUR)
    hidden = partial(OwnExperts, False, None if undivided else True)
    custom = partial(train_and_report, hidden, make_data, str(tmp_path), max_steps=1, **SGD, **FOUR)
    for case in (job, custom):
        first, second = pool(2).run(warnings_of, case)
        assert bool(first) is undivided and second == [], "by rank 0"
        assert all("does not depend on num_items_in_batch" in message for message in first)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_a_plain_model_causes_no_warning(precision: dict[str, bool], tmp_path: Any) -> None:
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), max_steps=1, **SGD, **FOUR, **precision)
    assert pool(2).run(warnings_of, job) == [[], []]

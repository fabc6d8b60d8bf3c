"""A router's auxiliary loss counts once: the mean of the micro-batches' own terms, weighted with their items."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import Trainer
from tests.support.compare import assert_equal, distances
from tests.support.experts import COEFFICIENT, FAMILIES, OwnExperts, mixtral, step_loss, weighted_means
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, stack, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

SAMPLES, GLOBAL_BATCH = 32, 16
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0}

make_data = partial(RaggedTokens, SAMPLES)


def equal(micro: int, samples: int) -> list[int]:
    return [micro] * (samples // micro)


@cache
def reference(family: str, micro: int) -> Trajectory:
    """``micro``: samples of a micro-batch."""
    loss = partial(step_loss, sizes=partial(equal, micro))
    return train_plainly(FAMILIES[family](), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)


def run(output_dir: Any, world: int, make_model: Any = mixtral, **arguments: Any) -> list[Trajectory]:
    job = partial(train_and_report, make_model, arguments.pop("data", make_data), str(output_dir))
    return pool(world).run(partial(job, arguments.pop("trainer_class", Trainer), **{**SGD, **arguments}))


def sizes(world: int, accumulation: int) -> dict[str, int]:
    micro = GLOBAL_BATCH // (world * accumulation)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}


PLACES = [
    (1, 0, 1), (1, 1, 2), (1, 2, 8), (1, 3, 8), (2, 0, 2), (2, 1, 8), (2, 2, 1), (2, 3, 2), (4, 0, 1), (4, 1, 2),
    (4, 2, 2), (4, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("world", "stage", "accumulation"), PLACES)
def test_trajectory_is_that_of_one_process(world: int, stage: int, accumulation: int, tmp_path: Any) -> None:
    """Loss, gradient norm and weights after four steps, at every stage and number of ranks and micro-batches."""
    arguments = {**sizes(world, accumulation), "zero_stage": stage}
    wanted = reference("mixtral", arguments["per_device_train_batch_size"])
    for found in run(tmp_path, world, **arguments):
        assert_equal(found, wanted)


# -- sequences that are cut: every rank's part is a micro-batch for the router ---------------------------------------


def long_data() -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens whose last 5 at least are padding: cut in four, a rank has nothing but padding."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(SAMPLES):
        used = int(torch.randint(4, 12, (), generator=generator))
        mask = (torch.arange(16) < used).long()
        tokens = torch.randint(3, 61, (16,), generator=generator) * mask
        rows.append({"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask})
    return rows


PARTS = {
    "cp2": [[*range(0, 4), *range(12, 16)], [*range(4, 12)]],
    "sp2": [[*range(0, 8)], [*range(8, 16)]],
    "sp4": [[*range(0, 4)], [*range(4, 8)], [*range(8, 12)], [*range(12, 16)]],
    "cp2 x sp2": [[*range(0, 4)], [*range(12, 16)], [*range(4, 8)], [*range(8, 12)]],
    "dp2 x sp2": [[*range(0, 8)], [*range(8, 16)]],
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("name", "cp", "sp", "dp"),
    [("cp2", 2, 1, 1), ("sp2", 1, 2, 1), ("sp4", 1, 4, 1), ("cp2 x sp2", 2, 2, 1), ("dp2 x sp2", 1, 2, 2)],
)
def test_cut_sequences(name: str, cp: int, sp: int, dp: int, stage: int, tmp_path: Any) -> None:
    """The mean over the parts of all ranks; a part that holds nothing but padding counts for nothing."""
    loss = partial(step_loss, sizes=partial(equal, 4), parts=PARTS[name])
    wanted = train_plainly(mixtral(), long_data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    arguments = {"context_parallel_size": cp, "sequence_parallel_size": sp, "zero_stage": stage}
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4 // dp}
    for found in run(tmp_path, dp * cp * sp, data=long_data, **arguments, **batch):
        assert_equal(found, wanted)


# -- the two parts, families, ragged batches -------------------------------------------------------------------------


def first_loss(output_dir: Any, world: int, accumulation: int, coefficient: float) -> float:
    arguments = {**sizes(world, accumulation), "zero_stage": 1, "max_steps": 1}
    return run(output_dir, world, partial(mixtral, coefficient), **arguments)[0].losses[0]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 1), (4, 4)])
def test_both_parts_of_the_loss(world: int, accumulation: int, tmp_path: Any) -> None:
    """The cross-entropy is the same in all layouts; the rest is the weighted mean of the micro-batches' terms."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(42)).tolist()[:GLOBAL_BATCH]
    data, model = make_data(), mixtral()
    micro, batches = GLOBAL_BATCH // (world * accumulation), []
    for begin in range(0, GLOBAL_BATCH, micro):
        batches.append(stack([data[index] for index in order[begin : begin + micro]]))
    with torch.no_grad():
        terms = [float(model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).aux_loss) for b in batches]
        whole = float(model(**stack([data[index] for index in order])).loss)
        whole -= COEFFICIENT * float(model(**stack([data[index] for index in order])).aux_loss)
    items = [int(b["labels"][:, 1:].ne(-100).sum()) for b in batches]
    wanted = sum(n * term for n, term in zip(items, terms, strict=True)) / sum(items)
    entropy = first_loss(tmp_path, world, accumulation, 0.0)
    assert entropy == pytest.approx(whole, rel=1e-5)
    auxiliary = first_loss(tmp_path, world, accumulation, COEFFICIENT) - entropy
    assert auxiliary == pytest.approx(COEFFICIENT * wanted, rel=1e-4)  # a difference of two losses 20 times as large
    if micro == 1:
        assert abs(sum(terms) / len(terms) - wanted) > 1e-3  # so that the weights matter


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_families(family: str, tmp_path: Any) -> None:
    for world, accumulation in ((1, 8), (2, 4)):
        for found in run(tmp_path, world, FAMILIES[family], **sizes(world, accumulation), zero_stage=2):
            assert_equal(found, reference(family, 2))


RAGGED = {37: [1, 1, 1, 2], 35: [1, 1, 1]}  # micro-batches of the last step of an epoch


def dealt(samples: int) -> list[int]:
    """Four replicas with two micro-batches of 2 each; of the last 3 samples of an epoch, one of them gets none."""
    return [2] * 8 if samples == GLOBAL_BATCH else RAGGED[samples + 32]


@pytest.mark.parametrize(("samples", "stage"), [(37, 0), (35, 0), (35, 3)])
def test_fillers_and_ragged_batches_count_by_their_items(samples: int, stage: int, tmp_path: Any) -> None:
    data, loss = partial(RaggedTokens, samples), partial(step_loss, sizes=dealt)
    wanted = train_plainly(mixtral(), data(), loss=loss, optimizer="sgd", learning_rate=0.3)
    for found in run(tmp_path, 4, data=data, **sizes(4, 2), zero_stage=stage):
        assert_equal(found, wanted)


# -- models and losses of one's own ----------------------------------------------------------------------------------

FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "zero_stage": 2}  # on two ranks


def by_weighted_means(make_model: Any) -> Trajectory:
    loss = partial(weighted_means, micro=2)
    return train_plainly(make_model(), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)


@pytest.mark.parametrize(("shows", "declared"), [(True, None), (False, True), (True, True)])
def test_a_model_of_ones_own(shows: bool, declared: bool | None, tmp_path: Any) -> None:
    """It shows the term among its outputs, or says that there is one."""
    make_model = partial(OwnExperts, shows, declared)
    wanted = by_weighted_means(make_model)
    for stage in (2, 3):
        for found in run(tmp_path, 2, make_model, **{**FOUR, "zero_stage": stage}):
            assert_equal(found, wanted)


def test_a_term_that_is_found_in_the_outputs_costs_no_random_numbers(tmp_path: Any) -> None:
    """The first micro-batch is computed twice, with the same dropout: bit for bit what a declared model gives."""
    found, declared = (
        run(tmp_path, 2, partial(OwnExperts, True, declaration, dropout=0.2), **FOUR)[0] for declaration in (None, True)
    )
    assert found.losses == declared.losses and found.grad_norms == declared.grad_norms


class CallsOurs(Trainer):
    """Adds nothing, and hands the count on."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
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
        self.accelerator.backward(loss)
        return loss.detach()


class WeighsByItself(Trainer):
    """A loss of one's own, as the documentation shows it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        targets = labels[:, 1:]
        total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        auxiliary = COEFFICIENT * outputs.aux_loss * targets.ne(-100).sum()
        loss = (total + auxiliary) / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("trainer_class", [CallsOurs, CallsOursWithoutTheCount, OwnStep, WeighsByItself])
def test_hooks_of_a_subclass(trainer_class: type[Trainer], tmp_path: Any) -> None:
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


def test_a_loss_function_weighs_the_term_by_itself(tmp_path: Any) -> None:
    for found in pool(2).run(partial(with_function, mixtral, str(tmp_path), True, **SGD, **FOUR)):
        assert_equal(found, reference("mixtral", 2))


def warnings_of(job: Any) -> list[str]:
    """What ``job`` warns of on this rank."""
    from ds_trainer.training import auxiliary_loss

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    auxiliary_loss.logger.addHandler(handler)
    try:
        job()
    finally:
        auxiliary_loss.logger.removeHandler(handler)
    return heard


@pytest.mark.parametrize("undivided", [True, False])
def test_a_term_that_nobody_weighs_is_noticed(undivided: bool, tmp_path: Any) -> None:
    """By the derivative of the first micro-batch's loss by the count; of a loss without such a term nothing is said."""
    job = partial(with_function, mixtral, str(tmp_path), not undivided, max_steps=1, **SGD, **FOUR)
    hidden = partial(OwnExperts, False, None if undivided else True)
    own = partial(train_and_report, hidden, make_data, str(tmp_path), max_steps=1, **SGD, **FOUR)
    for case in (job, own):
        for heard in pool(2).run(warnings_of, case):
            assert bool(heard) is undivided, heard
            assert all("does not depend on num_items_in_batch" in message for message in heard)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
def test_of_a_plain_model_nothing_is_said(precision: dict[str, bool], tmp_path: Any) -> None:
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), max_steps=1, **SGD, **FOUR, **precision)
    assert pool(2).run(warnings_of, job) == [[], []]

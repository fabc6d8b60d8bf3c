"""What a loss is the mean of is measured: models and functions of many kinds, whole runs in several layouts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.data.columns import find_label_names
from ds_trainer.training.loop.batch_splitting import samples_of_batch
from ds_trainer.training.loop.loss_measurement import LossMeasurement
from ds_trainer.training.loop.loss_rule import ItemCounter, Weighting, loss_in, loss_rule_of
from ds_trainer.utils.seeds import random_state
from tests.support.loss_functions import NONE, SUM, Head, LossCase, ctc
from tests.support.loss_models import CASES
from tests.support.pool import pool

BY_NAME = {case.name: case for case in CASES}


def measured(case: LossCase, model: nn.Module, batch: Any) -> Weighting:
    def loss_of(part: Any) -> torch.Tensor:
        return loss_in(model(**part), model, part)

    rule = loss_rule_of(model, find_label_names(model) or ["labels"])
    return LossMeasurement(loss_of, model, batch, rule.count).weighting()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loss_of_a_batch_follows_from_the_losses_of_its_parts(case: LossCase) -> None:
    model = case.model()
    torch.manual_seed(1)
    batch = case.batch()
    weighting = measured(case, model, batch)
    assert weighting.settled and weighting.additive is (case.unit != NONE)
    if case.unit == NONE:
        return
    assert (SUM if weighting.summed else str(weighting.count)) == case.unit
    if "drawn" in case.name or "MAE" in case.name or "Informer" in case.name or "Pretraining" in case.name:
        return  # a part draws other numbers
    model.eval()
    parts = [samples_of_batch(batch, rows) for rows in ([0], [1, 2], [3, 4, 5])]
    whole, *losses = (float(loss_in(model(**part), model, part).detach()) for part in [batch, *parts])
    weights = [1.0 if weighting.summed else float(weighting.count(part)) for part in parts]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
    assert total / (1.0 if weighting.summed else sum(weights)) == pytest.approx(whole, rel=1e-5)


def _own_negatives(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    sampled = torch.multinomial(torch.ones(len(logits), 5), 2)
    return (logits[:, :5].gather(1, sampled) - logits[:, :1]).relu().mean()


DRAWN = {
    "ViTMAEForPreTraining": True,
    "PatchTSTForPretraining": True,
    "noise drawn in the model": True,
    "mixup drawn in the loss": True,
    "masked reconstruction, mask drawn in the model": True,
    "sampled negatives": True,
    "NumPy's noise": True,
    "numbers without effect": False,
    "BertForMaskedLM": False,
    "pixel cross-entropy, 255 ignored": False,
}
OWN = {
    "sampled negatives": _own_negatives,
    "NumPy's noise": lambda z, labels: (z + float(np.random.rand())).square().mean(),
    "numbers without effect": lambda z, labels: z.square().mean() + 0.0 * torch.rand(()),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_loss_that_depends_on_random_numbers_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    case = BY_NAME.get(name)
    model = Head(OWN[name]) if case is None else case.model()
    batch = BY_NAME["hardest half of the batch"].batch() if case is None else case.batch()
    before = random_state()
    with caplog.at_level(logging.INFO, "ds_trainer"):
        measured(case or BY_NAME["CTC, mean"], model, batch)
    said = [record.getMessage() for record in caplog.records if "random numbers that it draws" in record.getMessage()]
    assert len(said) == DRAWN[name]
    assert torch.equal(before["torch"], random_state()["torch"]) and before["python"] == random_state()["python"]


# -- whole runs --------------------------------------------------------------------------------------------------------

RUNS = {
    "Wav2Vec2ForCTC (mean)": "samples",
    "pixel cross-entropy, 255 ignored": "entries of 'labels' other than 255",
    "BertForMaskedLM": "items",
    "TimeSeriesTransformerForPrediction": "entries of 'future_observed_mask' other than 0",
    "CTC, mean": "samples",
    "token cross-entropy, sum": "sum",
    "token cross-entropy, labels shifted": "entries of 'labels' after the first of each row other than -100",
    "mean over samples of means over tokens": "samples",
    "masked mean squared error": "entries of 'observed_mask' other than 0",
}


def rows_of(case: LossCase) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    batches = [case.batch(), case.batch()]
    return [{key: batch[key][row] for key in batch} for batch in batches for row in range(6)]


def trained(
    name: str, output_dir: str, micro_batch: int, accumulation: int, stage: int
) -> tuple[float, float, float, str]:
    """Loss and gradient norm of one step over 12 samples, the loss of their evaluation, and the weighting."""
    case = BY_NAME[name]
    gathers = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        deepspeed={"zero_optimization": {"stage": stage, **gathers}},
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.0,
        max_grad_norm=0.0,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    rows = rows_of(case)
    trainer = Trainer(case.model(), args, train_dataset=rows, eval_dataset=rows[:11])
    trainer.train()
    logs = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    weighting = trainer._ds_trainer.losses.rule.weighting
    found = logs["loss"], logs["grad_norm"], trainer.evaluate()["eval_loss"]
    trainer.engine.close()
    return *found, "sum" if weighting.summed else str(weighting.count)


def wanted(name: str) -> tuple[float, float, float]:
    """The same in plain PyTorch, in one batch."""
    case = BY_NAME[name]
    model, rows = case.model(), rows_of(case)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    loss = loss_in(model(**batch), model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    part = {key: value[:11] for key, value in batch.items()}
    model.eval()
    with torch.no_grad():
        return float(loss.detach()), float(norm), float(loss_in(model(**part), model, part))


def all_trained(output_dir: str, names: list[str], layouts: list[tuple[int, int]], stage: int) -> Any:
    return {(n, size, more): trained(n, output_dir, size, more, stage) for n in names for size, more in layouts}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("ranks", "layouts", "stage"), [(1, [(1, 12)], 0), (2, [(3, 2)], 3), (4, [(3, 1)], 1)])
def test_runs_equal_one_process_in_every_layout(
    ranks: int, layouts: list[tuple[int, int]], stage: int, tmp_path: Path
) -> None:
    for found in pool(ranks).run(all_trained, str(tmp_path), list(RUNS), layouts, stage):
        for (name, *layout), (loss, norm, evaluated, unit) in found.items():
            assert unit == RUNS[name], (name, layout)
            expected = wanted(name)
            assert (loss, norm, evaluated) == pytest.approx(expected, rel=2e-5), (name, layout)


def wrongly_trained(name: str, output_dir: str) -> tuple[float, float, float]:
    """As :func:`trained`, with the items as weights, as if nothing were measured."""
    real = LossMeasurement.weighting
    LossMeasurement.weighting = lambda self, kept=None: Weighting(self.items, settled=True)  # type: ignore[method-assign]
    try:
        return trained(name, output_dir, 3, 2, 0)[:3]
    finally:
        LossMeasurement.weighting = real  # type: ignore[method-assign]


def test_a_wrong_weight_is_noticed(tmp_path: Path) -> None:
    for name in ("Wav2Vec2ForCTC (mean)", "token cross-entropy, sum", "masked mean squared error"):
        expected = wanted(name)
        found = pool(2).run(wrongly_trained, name, str(tmp_path))[0]
        assert all(abs(a - b) > 1e-4 * abs(b) for a, b in zip(found, expected, strict=True)), name


# -- side effects, and what cannot be measured -------------------------------------------------------------------------


class Counting(Head):
    """Counts its passes in an attribute and a buffer, draws random numbers, and has batch normalization."""

    def __init__(self) -> None:
        super().__init__(lambda z, labels: nn.functional.cross_entropy(z, labels))
        self.passes = 0
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x: torch.Tensor, labels: Any = None, **batch: Any) -> dict[str, torch.Tensor]:
        self.passes += 1
        self.seen += 1
        return super().forward(self.norm(self.frozen(x)) + 0 * torch.rand(len(x), 1), labels)


def test_a_measurement_leaves_no_trace() -> None:
    model = Counting()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(1)
    batch, before = BY_NAME["cross-entropy with label smoothing"].batch(), random_state()
    assert measured(CASES[0], model, batch).settled
    assert torch.equal(random_state()["torch"], before["torch"]) and random_state()["python"] == before["python"]
    assert model.passes == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_sentence_says_what_depends_on_the_layout(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    case = BY_NAME["in-batch negatives"]
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        assert not measured(case, case.model(), case.batch()).additive
    [record] = caplog.records
    for word in ("Head", "parts", "per_device_train_batch_size", "weighted by their samples", "num_items_in_batch"):
        assert word in record.getMessage()


def test_a_loss_that_needs_few_samples_is_measured_with_two(caplog: pytest.LogCaptureFixture) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(logits) < 2:
            raise ValueError("one sample has no pair")
        return nn.functional.cross_entropy(logits, labels)

    torch.manual_seed(1)
    batch = BY_NAME["cross-entropy with label smoothing"].batch()
    assert measured(CASES[0], Head(loss), batch).additive
    few = samples_of_batch(batch, [0, 1])
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.INFO, "ds_trainer"):
        found = measured(CASES[0], Head(loss), few)
    assert isinstance(found.count, ItemCounter) and "one sample has no pair" in caplog.text


class OtherInTraining(Head):
    """A mean over samples in training, over labels in evaluation; in training it draws, and keeps a queue if asked."""

    def __init__(self, queues: bool) -> None:
        super().__init__(lambda z, labels: z.sum())
        self.queues = queues
        self.register_buffer("queue", torch.ones(4, 5))

    def forward(self, x: torch.Tensor, labels: Any = None, **batch: Any) -> dict[str, torch.Tensor]:
        logits = self.layer(nn.functional.dropout(x, 0.1, self.training))
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        used = (labels != -100).sum(1)
        loss = (losses.sum(1) / used).mean() if self.training else losses.sum() / used.sum()
        if self.queues and self.training:
            loss = loss + (logits.mean(1) @ self.queue.T).mean()
            self.queue = torch.cat([logits.mean(1).detach(), self.queue])[:4]
        return {"loss": loss, "logits": logits}


def test_training_and_evaluation_may_be_means_of_different_things() -> None:
    torch.manual_seed(1)
    batch, model = BY_NAME["token cross-entropy"].batch(), OtherInTraining(queues=False)
    items = loss_rule_of(model, ["labels"]).count

    def loss_of(part: Any) -> torch.Tensor:
        return loss_in(model(**part), model, part)

    trained = LossMeasurement(loss_of, model, batch, items, training=True).weighting()
    assert (str(trained.count), trained.for_evaluation, trained.settled) == ("samples", False, True)
    assert str(LossMeasurement(loss_of, model, batch, items).weighting().count) == "items"
    model = OtherInTraining(queues=True)
    assert not LossMeasurement(loss_of, model, batch, items, training=True).weighting().additive
    assert LossMeasurement(loss_of, model, batch, items).weighting().additive
    assert torch.equal(model.queue, torch.ones(4, 5))


def calls_of(case: LossCase, training: bool) -> int:
    model, calls = case.model(), []
    torch.manual_seed(1)
    batch = case.batch()

    def loss_of(part: Any) -> torch.Tensor:
        calls.append(1)
        return loss_in(model(**part), model, part)

    LossMeasurement(loss_of, model, batch, loss_rule_of(model, ["labels"]).count, training=training).weighting()
    return len(calls)


def test_a_measurement_takes_few_passes() -> None:
    assert calls_of(BY_NAME["token cross-entropy"], training=True) == 5
    assert calls_of(BY_NAME["in-batch negatives"], training=True) == 6  # also as pairs of rows
    assert calls_of(BY_NAME["noise drawn in the model"], training=True) == 7  # with another seed, too


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_a_contrastive_loss_of_like_vectors_is_no_sum(spread: float) -> None:
    """It is the logarithm of the number of samples: of 4 what it is of 2 and 2 together."""
    torch.manual_seed(1)

    class Alike(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(spread * x @ x.T, torch.arange(len(x)))}

    model, batch = Alike(), {"x": torch.randn(4, 3)}

    def loss_of(part: Any) -> torch.Tensor:
        return loss_in(model(**part), model, part)

    found = LossMeasurement(loss_of, model, batch, loss_rule_of(model, ["labels"]).count).weighting()
    assert (found.additive, found.summed) == (False, False)


class InTraining(Head):
    """Has no loss in evaluation mode, and dropout."""

    def forward(self, x: torch.Tensor, labels: Any = None, **batch: Any) -> dict[str, torch.Tensor]:
        if not self.training:
            return {"logits": self.layer(x)}
        return super().forward(nn.functional.dropout(x, 0.5, self.training), labels)


def test_a_loss_of_training_mode_is_measured_there() -> None:
    case = BY_NAME["CTC, mean"]
    torch.manual_seed(1)
    found = measured(case, InTraining(ctc("mean")), case.batch())
    assert (str(found.count), found.additive, found.settled) == ("samples", True, True)


def stream_of(rows: list[dict[str, torch.Tensor]]) -> Any:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(rows)

    return Stream()


def test_a_batch_that_cannot_tell_is_followed_by_one_that_can(tmp_path: Path) -> None:
    """A stream whose first batches have labels of one length: a mean over samples looks like one over labels."""
    torch.manual_seed(1)
    rows = [{"x": torch.randn(30, 4) * (1 + row % 5), "labels": torch.randint(1, 5, (8,))} for row in range(24)]
    for row in range(12, 24):
        rows[row]["labels"][1 + row % 7 :] = -100
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=5, use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(Head(ctc("mean")), args, train_dataset=stream_of(rows))
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            seen.append(
                (
                    str(trainer._ds_trainer.losses.rule.weighting.count),
                    trainer._ds_trainer.losses.rule.weighting.settled,
                )
            )

    trainer.add_callback(Look())
    trainer.train()
    assert seen == [("items", False)] * 3 + [("samples", True)] * 2
    trainer.engine.close()


def test_single_samples_of_a_stream_are_joined(tmp_path: Path) -> None:
    torch.manual_seed(1)
    rows = [{"x": torch.randn(30, 4) * (1 + row), "labels": torch.randint(1, 5, (8,))} for row in range(4)]
    for row in range(1, 4):
        rows[row]["labels"][1 + row :] = -100
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=1,
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(Head(ctc("mean")), args, train_dataset=stream_of(rows))
    trainer.train()
    whole = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert logged == pytest.approx(float(Head(ctc("mean"))(**whole)["loss"].detach()), rel=1e-5)
    trainer.engine.close()

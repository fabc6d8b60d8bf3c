"""Label smoothing: the formula, its normaliser, the numbers of transformers.Trainer, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import ds_trainer
from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model.label_smoothing import LabelSmoother, label_smoother
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal, distances, relative
from tests.support.models import RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.oracle import train_plainly
from tests.support.pool import pool
from tests.support.reference_run import OURS, reference_run
from tests.support.runs import train_and_report

FACTOR = 0.2
SAMPLES = 37

make_data = partial(RaggedTokens, SAMPLES)


def by_hand(logits: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
    """Sum over the targets of ``(1 - e) nll + e mean(-log p)``, item by item, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(logits.double().flatten(0, -2), targets.flatten(), strict=True):
        if target != -100:
            surprise = -(row - row.logsumexp(-1))
            total = total + (1 - factor) * surprise[target] + factor * surprise.mean()
    return total


def smoothed_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The oracle: over the whole global batch, in one process."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    log_p = F.log_softmax(logits, -1)
    chosen = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    each = (1 - FACTOR) * chosen - FACTOR * log_p.mean(-1)
    counted = targets != -100
    return each[counted].sum() / counted.sum()


@pytest.mark.parametrize("shift", [True, False])
def test_the_formula_of_label_smoothing(shift: bool) -> None:
    from transformers.trainer_pt_utils import LabelSmoother as Reference

    torch.manual_seed(0)
    model = nn.Module()
    model.shifts_labels = shift
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 2:] = -100
    smoother = LabelSmoother(model, FACTOR, ["labels"])
    inputs: dict[str, Any] = {"x": 1, "labels": labels}
    targets = smoother.take_targets(inputs)
    assert list(inputs) == ["x"]
    found = smoother({"logits": logits}, targets, num_items_in_batch=torch.tensor(11.0))
    shifted_pair = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    assert found.item() == pytest.approx(by_hand(*shifted_pair, FACTOR).item() / 11, rel=1e-6)
    wanted = Reference(FACTOR)({"logits": logits}, labels, shift_labels=shift, num_items_in_batch=torch.tensor(11.0))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    mean = Reference(FACTOR)((logits,), labels, shift_labels=shift)
    assert smoother((logits,), targets).item() == pytest.approx(mean.item(), rel=1e-6)


def sizes(world: int, accumulation: int) -> dict[str, int]:
    return {"per_device_train_batch_size": 16 // (world * accumulation), "gradient_accumulation_steps": accumulation}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("world", "stage", "accumulation"), [(1, 0, 1), (1, 3, 4), (2, 0, 2), (2, 3, 2), (2, 2, 1)])
def test_trajectory_is_that_of_one_process(world: int, stage: int, accumulation: int, tmp_path: Path) -> None:
    wanted = train_plainly(tiny_llama(), make_data(), loss=smoothed_token_loss, learning_rate=2e-3)
    arguments = {**sizes(world, accumulation), "max_grad_norm": 0.0, "zero_stage": stage, "learning_rate": 2e-3}
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), label_smoothing_factor=FACTOR, **arguments)
    for found in pool(world).run(job):
        assert_equal(found, wanted)
    if (world, stage) == (2, 2):  # negative control: without the factor the numbers are others
        job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), **arguments)
        assert distances(pool(world).run(job)[0], wanted)["losses"] > 1e-3


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_transformers(accumulation: int, tmp_path: Path) -> None:
    arguments = {**sizes(1, accumulation), "label_smoothing_factor": FACTOR}
    losses, norms = reference_run(tiny_llama(), RaggedTokens(64), tmp_path / "theirs", **arguments)
    job = partial(train_and_report, tiny_llama, partial(RaggedTokens, 64), str(tmp_path / "ours"), **OURS, **arguments)
    (found,) = pool(1).run(job)
    assert relative(found.losses, losses) < 1e-5
    assert relative(found.grad_norms, norms) < 1e-4


def class_rows(samples: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"input_ids": torch.randint(3, 61, (8,), generator=generator), "labels": torch.tensor(index % 3)}
        for index in range(samples)
    ]


def tiny_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    dropped = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(BertConfig(vocab_size=61, num_labels=3, **sizes, **dropped))


def tiny_encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0)
    return T5ForConditionalGeneration(T5Config(vocab_size=61, decoder_start_token_id=0, **sizes))


def pairs(samples: int, with_decoder_inputs: bool = False) -> list[dict[str, torch.Tensor]]:
    rows = []
    for row in RaggedTokens(samples).rows:
        labels = row["labels"][:7].clone()
        made = {"input_ids": row["input_ids"], "labels": labels}
        if with_decoder_inputs:
            shifted = torch.cat([torch.zeros(1, dtype=torch.int64), labels[:-1]])
            made["decoder_input_ids"] = shifted.masked_fill(shifted == -100, 0)
        rows.append(made)
    return rows


def test_classes_and_encoder_decoder_models(tmp_path: Path) -> None:
    """Class labels; and a decoder whose input is made of the labels, as transformers' collator would have made it."""
    arguments = {"label_smoothing_factor": FACTOR, "per_device_train_batch_size": 4}
    cases = [
        (tiny_classifier, partial(class_rows, 32), class_rows(32)),
        (tiny_encoder_decoder, partial(pairs, 32), pairs(32, with_decoder_inputs=True)),
    ]
    for make_model, ours, reference in cases:
        losses, _ = reference_run(make_model(), reference, tmp_path / "theirs", **arguments)
        job = partial(train_and_report, make_model, ours, str(tmp_path / "ours"), **OURS, **arguments)
        assert relative(pool(1).run(job)[0].losses, losses) < 1e-5


def evaluated(output_dir: str, zero_stage: int) -> float:
    args = TrainingArguments(
        output_dir,
        label_smoothing_factor=FACTOR,
        use_cpu=True,
        disable_tqdm=True,
        per_device_eval_batch_size=3,
        zero_stage=zero_stage,
    )
    return Trainer(tiny_llama(), args, eval_dataset=RaggedTokens(10)).evaluate()["eval_loss"]


def test_evaluation_is_smoothed_too(tmp_path: Path) -> None:
    rows = RaggedTokens(10).rows
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        wanted = smoothed_token_loss(tiny_llama(), batch).item()
    for found in pool(2).run(partial(evaluated, str(tmp_path), 1)):
        assert found == pytest.approx(wanted, rel=1e-6)


class NoMethod(nn.Module):
    """An encoder-decoder model that keeps its way from labels to decoder inputs to itself."""

    class config:
        is_encoder_decoder = True


def test_labels_that_only_the_model_can_read_are_not_smoothed() -> None:
    labels = torch.tensor([[4, 5, -100]])
    inputs: dict[str, Any] = {"input_ids": labels, "labels": labels}
    assert LabelSmoother(NoMethod(), FACTOR, ["labels"]).take_targets(inputs) is labels
    assert "labels" in inputs


def test_multi_label_classification_is_not_smoothed() -> None:
    model = tiny_classifier()
    model.config.problem_type = "multi_label_classification"  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"label_smoothing_factor=0\.\d+ is ignored: .* multi_label_classification"):
        assert label_smoother(model, FACTOR, ["labels"]) is None
    assert label_smoother(tiny_classifier(), 0.0, ["labels"]) is None


def test_the_library_warns_of_multi_label_classification_in_the_same_way(tmp_path: Path) -> None:
    for module in (ds_trainer, transformers):
        model = tiny_classifier()
        model.config.problem_type = "multi_label_classification"  # type: ignore[union-attr]
        args = module.TrainingArguments(str(tmp_path), label_smoothing_factor=FACTOR, use_cpu=True)
        with pytest.warns(UserWarning, match="(?i)multi.label.classification"):
            assert module.Trainer(model, args).label_smoother is None


def test_several_labels_are_warned_about(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="of the labels labels, sentence_label, the first .* is smoothed"):
        assert label_smoother(tiny_classifier(), FACTOR, ["labels", "sentence_label"]) is not None
    recwarn.clear()
    label_smoother(tiny_classifier(), FACTOR, ["labels"])
    label_smoother(tiny_classifier(), 0.0, ["labels", "sentence_label"])
    assert not recwarn.list


def test_refusals(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), label_smoothing_factor=FACTOR, use_cpu=True)
    with pytest.raises(ConfigError, match="compute_loss_func computes the loss and would ignore it"):
        Trainer(tiny_llama(), args, compute_loss_func=lambda outputs, labels, num_items_in_batch: 0.0)
    smoother = LabelSmoother(Regression(), FACTOR, ["labels"])
    with pytest.raises(ConfigError, match=r"has no labels \(looked for labels\)"):
        smoother.take_targets({"x": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"'labels' is torch.float32"):
        smoother.take_targets({"labels": regression_rows(1)[0]["labels"]})
    with pytest.raises(ConfigError, match=r"labels are \(2, 3\) and the logits of Regression are \(2, 4, 5\)"):
        smoother((torch.zeros(2, 4, 5),), torch.zeros(2, 3, dtype=torch.int64))

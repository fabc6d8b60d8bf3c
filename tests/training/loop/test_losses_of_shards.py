"""With sharded sequences a loss without item count is that of one process, is refused, or is said to depend on them.

So are those of micro-batches without anything that the loss is a mean of.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support.layouts import PlainAttention
from tests.support.loss_functions import Head
from tests.support.models import VOCABULARY
from tests.support.pool import pool

Batch = dict[str, torch.Tensor]


def tokens(logits: torch.Tensor, batch: Batch, **how: Any) -> torch.Tensor:
    labels = batch.get("shift_labels")
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100) if labels is None else labels
    return F.cross_entropy(logits.transpose(1, 2), labels, **how)


def weighted(logits: torch.Tensor, batch: Batch, by: str) -> torch.Tensor:
    return (tokens(logits, batch, reduction="none") * batch[by]).sum() / batch[by].sum()


def mean_of_means(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    losses = tokens(logits, batch, reduction="none")
    return (losses.sum(1) / losses.ne(0).sum(1)).mean()


def shifts_itself(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


EQUAL: dict[str, Callable[[torch.Tensor, Batch], torch.Tensor]] = {
    "mean": tokens,
    "sum": partial(tokens, reduction="sum"),
    "sum / samples": lambda z, batch: tokens(z, batch, reduction="sum") / len(z),
    "sum / 100": lambda z, batch: tokens(z, batch, reduction="sum") / 100,
    "sum / positions": lambda z, batch: tokens(z, batch, reduction="sum") / z[..., 0].numel(),
    "by mask": partial(weighted, by="attention_mask"),
    "by weights": partial(weighted, by="weights"),
}
REFUSED = {"mean of means": mean_of_means, "shifts itself": shifts_itself}
SAID = {"class weights": partial(tokens, weight=torch.linspace(0.2, 3, VOCABULARY))}
LOSSES = {**EQUAL, **REFUSED, **SAID}


def contrastive(logits: torch.Tensor, batch: Batch, count: Any) -> torch.Tensor:
    found = logits.mean(1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)), reduction="sum") / count


# Losses that take num_items_in_batch.
COUNTED: dict[str, Callable[[torch.Tensor, Batch, Any], torch.Tensor]] = {
    "divided": lambda z, batch, count: tokens(z, batch, reduction="sum") / count,
    "ignored, but in the graph": lambda z, batch, count: tokens(z, batch) + 0 * count,
    "ignored": lambda z, batch, count: tokens(z, batch),
    "shifts itself, divided": lambda z, batch, count: (
        F.cross_entropy(z[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / count
    ),
    "contrastive, divided": contrastive,
    "undivided term": lambda z, batch, count: tokens(z, batch, reduction="sum") / count + z.square().mean(),
}


class Own(Trainer):
    loss = ""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(**{name: value for name, value in inputs.items() if name != "weights"})
        loss = LOSSES[self.loss](outputs["logits"], inputs)
        return (loss, outputs) if return_outputs else loss


class Counted(Own):
    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{name: value for name, value in inputs.items() if name != "weights"})
        loss = COUNTED[self.loss](outputs["logits"], inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def rows() -> list[Batch]:
    generator, made = torch.Generator().manual_seed(0), []
    for row in range(12):
        ids, used = torch.randint(3, VOCABULARY, (24,), generator=generator), 5 + 7 * row % 19
        labels = torch.where((torch.arange(24) < used) & (torch.arange(24) >= row % 4), ids, -100)
        weights = torch.rand(24, generator=generator) * labels.ne(-100)
        mask = (torch.arange(24) < used).long()
        made.append({"input_ids": ids * mask, "labels": labels, "attention_mask": mask, "weights": weights})
    return made


def trained(name: str, folder: str, **values: Any) -> Any:
    """Loss, norm of the gradient and loss of an evaluation, alone and after the training; or the refusal; warnings."""
    args = TrainingArguments(
        folder, optim="sgd", learning_rate=0.0, max_grad_norm=0.0, max_steps=1, logging_steps=1, use_cpu=True,
        train_sampling_strategy="sequential", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        **values
    )  # fmt: skip
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_trainer").addHandler(handler)
    try:
        kind, model = Counted if name in COUNTED else Own, PlainAttention()
        model.accepts_loss_kwargs = name in COUNTED
        trainer = kind(model, args, train_dataset=rows(), eval_dataset=rows()[:11])
        trainer.loss = name
        alone = trainer.evaluate()["eval_loss"]
        trainer.train()
        logs = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
        found = logs["loss"], logs["grad_norm"], trainer.evaluate()["eval_loss"], alone
        trainer.engine.close()
        return found, said
    except ConfigError as error:
        return str(error), said
    finally:
        logging.getLogger("ds_trainer").removeHandler(handler)


def wanted(name: str) -> tuple[float, ...]:
    model, batch = PlainAttention(), torch.utils.data.default_collate(rows())

    def loss_of(part: Batch) -> torch.Tensor:
        logits = model(part["input_ids"], attention_mask=part["attention_mask"])["logits"]
        if name in COUNTED:
            return COUNTED[name](logits, part, part["labels"][:, 1:].ne(-100).sum())
        return LOSSES[name](logits, part)

    loss = loss_of(batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    evaluated = float(loss_of({key: value[:11] for key, value in batch.items()}).detach())
    return float(loss.detach()), float(norm), evaluated, evaluated


def all_trained(folder: str, names: list[str], **values: Any) -> dict[str, Any]:
    return {name: trained(name, folder, **values) for name in names}


THREE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "per_device_eval_batch_size": 4}
TWO = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 2": (2, {**THREE, "context_parallel_size": 2}),
    "sp 2, ZeRO 3": (2, {**THREE, "sequence_parallel_size": 2, "zero_stage": 3}),
    "tp 2": (2, {**THREE, "tensor_parallel_size": 2}),
    "dp 2, cp 2": (4, {**TWO, "context_parallel_size": 2}),
    "tp 2, cp 2": (4, {**THREE, "tensor_parallel_size": 2, "context_parallel_size": 2}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_of_shards_is_that_of_one_process_or_said(layout: str, tmp_path: Path) -> None:
    world, values = LAYOUTS[layout]
    sharded = layout != "tp 2"
    of_ranks = pool(world).run(partial(all_trained, str(tmp_path), list(LOSSES), **values))
    for rank, found in enumerate(of_ranks):
        for name, (result, said) in found.items():
            if name in REFUSED and sharded:
                assert isinstance(result, str) and "does not follow from its losses for their shards" in result, name
            elif name not in SAID:
                assert result == pytest.approx(wanted(name), rel=2e-5), (name, layout)
            elif rank == 0:
                what = "which tokens of a sequence a rank has" if sharded else "which samples share a micro-batch"
                assert what in " ".join(said)


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", ["cp 2", "tp 2", "dp 2", "dp 2, cp 2"])
def test_a_loss_with_the_count_is_that_of_one_process_or_said(layout: str, tmp_path: Path) -> None:
    world, values = (2, TWO) if layout == "dp 2" else LAYOUTS[layout]
    found = pool(world).run(partial(all_trained, str(tmp_path), list(COUNTED), **values))[0]
    for name, words in {
        "divided": "",
        "ignored": "does not depend on num_items_in_batch",
        "ignored, but in the graph": "does not depend on num_items_in_batch",
        "shifts itself, divided": "is not the sum of its losses for their shards" if "cp" in layout else "",
        "contrastive, divided": "for some samples it is not the sum of the losses of parts of them",
        "undivided term": "does not depend on num_items_in_batch, although the rest is divided by it",
    }.items():
        result, said = found[name]
        assert words in result if isinstance(result, str) else words in " ".join(said), (name, result, said)
        if isinstance(result, str):
            continue
        if (words.startswith("does not depend on num_items_in_batch") and "although" not in words) or not words:
            assert result == pytest.approx(wanted(name), rel=2e-5), (name, layout)
        else:
            assert result != pytest.approx(wanted(name), rel=2e-5), (name, layout)


def _known(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of a micro-batch without known values it is 0 / 0, with a gradient of nan."""
    known = ~labels.isnan()
    return ((logits[..., 0] - labels.nan_to_num()).square() * known).sum() / known.sum()


def _over_positives(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of a micro-batch without positives it is infinite: what it adds to the sum of all is lost."""
    return nn.functional.binary_cross_entropy_with_logits(logits[:, 0, :1], labels[:, :1], reduction="sum") / (
        labels[:, :1].sum()
    )


def empty_one(loss: Any, output_dir: str, missing: float, stage: int) -> tuple[list[float], list[float]]:
    """Loss and norm of a step with three micro-batches, one without anything; loss of an evaluation. And wanted."""
    torch.manual_seed(1)
    labels = torch.full((12, 3), missing)
    for row in (0, 1, 2, 3, 8, 9, 10, 11):
        labels[row, : 1 + row % 3] = 1.0 + row * float(missing != 0)
    rows = [{"x": torch.randn(3, 4), "labels": labels[row]} for row in range(12)]
    args = TrainingArguments(
        output_dir, per_device_train_batch_size=4 // distributed.world_size(), gradient_accumulation_steps=3,
        per_device_eval_batch_size=4 // distributed.world_size(), zero_stage=stage, optim="sgd", learning_rate=0.0,
        max_grad_norm=0.0, max_steps=1, logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
        train_sampling_strategy="sequential", remove_unused_columns=False
    )  # fmt: skip
    trainer = Trainer(Head(loss), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    logs = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    found = [logs["loss"], logs["grad_norm"], trainer.evaluate()["eval_loss"]]
    trainer.engine.close()
    model = Head(loss)
    whole = model(**torch.utils.data.default_collate(rows))["loss"]
    whole.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return found, [float(whole.detach()), float(norm), float(whole.detach())]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_micro_batch_without_items_has_no_gradient(ranks: int, stage: int, tmp_path: Path) -> None:
    found, wanted = pool(ranks).run(empty_one, _known, str(tmp_path), float("nan"), stage)[0]
    assert found == pytest.approx(wanted, rel=2e-5)


def test_what_a_count_of_zero_divides_is_not_lost_in_silence(tmp_path: Path) -> None:
    with_warning = pool(1).run(empty_one, _over_positives, str(tmp_path), 0.0, 0)[0][0]
    assert not any(math.isfinite(value) for value in with_warning[:2])

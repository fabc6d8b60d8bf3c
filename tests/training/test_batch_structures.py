"""Batches of any structure that a subclass unpacks: weights, losses and predictions are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import ConfigError, Trainer, TrainingArguments
from tests.support.compare import relative, weight_distance
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.test_own_steps import Classifier, rows

SAMPLES, EVALUATED = 22, 10  # neither fills its last micro-step: on two ranks one has a dummy


class Named(NamedTuple):
    x: Any
    labels: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    labels: Any


class Movable:
    """Moves itself, as batches of PyTorch Geometric do."""

    def __init__(self, x: Any, labels: Any) -> None:
        self.x, self.labels = x, labels

    def to(self, device: Any) -> Movable:
        return Movable(self.x.to(device), self.labels.to(device))


def encoding(x: Any, labels: Any) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "labels": labels})


def column(x: Any, labels: Any) -> Any:
    return torch.cat([x, labels[:, None]], 1)


Unpack = Callable[[Any], tuple[Any, Any]]
attributes: Unpack = lambda batch: (batch.x, batch.labels)  # noqa: E731
STRUCTURES: dict[str, tuple[Callable[[Any, Any], Any], Unpack]] = {
    "tuple": (lambda x, labels: (x, labels), lambda batch: batch),
    "list": (lambda x, labels: [x, labels], lambda batch: (batch[0], batch[1])),
    "with names": (lambda x, labels: (["a"] * len(x), x, labels), lambda batch: batch[1:]),
    "two dicts": (lambda x, labels: ({"x": x}, {"y": labels}), lambda batch: (batch[0]["x"], batch[1]["y"])),
    "nested": (lambda x, labels: [[x, {"y": (labels,)}]], lambda batch: (batch[0][0], batch[0][1]["y"][0])),
    "dict of dicts": (lambda x, labels: {"a": {"x": x, "y": labels}}, lambda batch: (batch["a"]["x"], batch["a"]["y"])),
    "list of samples": (
        lambda x, labels: list(zip(x, labels.tolist(), strict=True)),
        lambda batch: (torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch])),
    ),
    "numbers": (
        lambda x, labels: {"x": x.tolist(), "y": labels.tolist()},
        lambda batch: (torch.tensor(batch["x"]), torch.tensor(batch["y"])),
    ),
    "named tuple": (Named, attributes),
    "dataclass": (Frozen, attributes),
    "object": (Movable, attributes),
    "BatchEncoding": (encoding, attributes),
    "tensor": (column, lambda batch: (batch[:, :4], batch[:, 4].long())),
}


class Unpacks(Trainer):
    """Unpacks a batch in the loss, and in the prediction."""

    unpack: Unpack

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        x, labels = self.unpack(inputs)
        outputs = model(x=x, labels=labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class UnpacksInSteps(Trainer):
    """Unpacks it in ``training_step`` and ``prediction_step``."""

    unpack: Unpack

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        x, labels = self.unpack(self._prepare_inputs(inputs))
        loss = model(x=x, labels=labels)["loss"] / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            x, labels = self.unpack(self._prepare_inputs(inputs))
            outputs = model(x=x, labels=labels)
        return outputs["loss"], outputs["logits"], labels


def report(name: str, output_dir: str, world: int, cls: type[Trainer] = Unpacks, samples: int = SAMPLES) -> Any:
    pack, unpack = STRUCTURES[name]
    args = TrainingArguments(
        output_dir,
        zero_stage=3 if world == 2 else 0,
        num_train_epochs=1,
        per_device_train_batch_size=4 // world,
        per_device_eval_batch_size=4 // world,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.3,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )

    def collate(chosen: list[Any]) -> Any:
        return pack(torch.stack([row["x"] for row in chosen]), torch.tensor([row["labels"] for row in chosen]))

    trainer: Any = cls(
        Classifier(), args, train_dataset=rows(samples), eval_dataset=rows(EVALUATED), data_collator=collate
    )
    trainer.unpack = unpack
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics, predicted = trainer.evaluate(), trainer.predict(rows(EVALUATED))
    weights = whole_weights(trainer)
    trainer.engine.close()
    return weights, losses, metrics["eval_loss"], metrics["eval_items"], torch.as_tensor(predicted.predictions)


def plain(samples: int = SAMPLES) -> Any:
    model, data, losses = Classifier(), rows(samples), []
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for first in range(0, samples, 8):
        batch = data[first : first + 8]
        labels = torch.tensor([row["labels"] for row in batch])
        loss = model(torch.stack([row["x"] for row in batch]), labels)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    data = rows(EVALUATED)
    with torch.no_grad():
        labels = torch.tensor([row["labels"] for row in data])
        outputs = model(torch.stack([row["x"] for row in data]), labels)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return weights, losses, outputs["loss"].item(), EVALUATED, outputs["logits"]


def assert_as(found: Any, wanted: Any, name: str) -> None:
    assert weight_distance(found[0], wanted[0]) < 1e-5, name
    assert relative(found[1], wanted[1]) < 1e-5, name
    assert found[2] == pytest.approx(wanted[2], rel=1e-5) and found[3] == wanted[3], name
    torch.testing.assert_close(found[4], wanted[4], rtol=1e-4, atol=1e-5)


def reports(names: list[str], output_dir: str, world: int) -> dict[str, Any]:
    return {name: report(name, output_dir, world) for name in names}


@pytest.mark.cases(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_unpacks_its_batch_is_that_of_plain_pytorch(world: int, tmp_path: Any) -> None:
    wanted = plain()
    for name, found in pool(world).run(reports, list(STRUCTURES), str(tmp_path), world)[0].items():
        assert_as(found, wanted, name)


def test_steps_that_unpack_their_batches(tmp_path: Any) -> None:
    wanted = plain(24)
    for name in ("tuple", "dataclass"):
        assert_as(pool(2).run(report, name, str(tmp_path), 2, UnpacksInSteps, 24)[0], wanted, name)


# -- layouts -----------------------------------------------------------------------------------------------------------


class Tokens(Trainer):
    """Its batches are tuples of token ids and labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        logits = model(input_ids=inputs[0]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[1][:, 1:].flatten())


def of_tokens(output_dir: str, **layout: int) -> Any:
    args = TrainingArguments(
        output_dir, max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", use_cpu=True,
        disable_tqdm=True, train_sampling_strategy="sequential", remove_unused_columns=False, **layout
    )  # fmt: skip
    collate = lambda chosen: tuple(torch.stack([row[name] for row in chosen]) for name in ("input_ids", "labels"))  # noqa: E731
    trainer = Tokens(tiny_llama(), args, train_dataset=RaggedTokens(8), data_collator=collate)
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.engine.close()
    return losses


def of_layout(output_dir: str, name: str, size: int) -> Any:
    return of_tokens(output_dir, **{name: size})


def test_ranks_of_a_tensor_parallel_replica_get_the_same_tuple(tmp_path: Any) -> None:
    (alone,) = pool(1).run(of_layout, str(tmp_path / "1"), "tensor_parallel_size", 1)
    both = pool(2).run(of_layout, str(tmp_path / "2"), "tensor_parallel_size", 2)
    assert relative(both[0], alone) < 1e-5 and both[0] == both[1]


def test_a_sharded_sequence_needs_a_batch_with_names(tmp_path: Any) -> None:
    for text in pool(2).run(of_layout, str(tmp_path), "sequence_parallel_size", 2):
        assert "A batch is a" in text and "sequence_parallel_size=2 shard its items by their names" in text

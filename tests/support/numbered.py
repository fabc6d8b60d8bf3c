"""Runs on samples that are their own number, so that a test sees which ones reached the model."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ds_trainer import Trainer, TrainingArguments
from tests.support.runs import whole_weights

SAMPLES = 24


class Numbers(Dataset[Any]):
    """``samples`` samples that are their own number, each of another length."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(index), "input_ids": [0] * (1 + (7 * index) % 13)}


class NumberStream(IterableDataset[Any]):
    """The same samples in order, without a length."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from (Numbers(self.samples)[index] for index in range(self.samples))


class ShuffledStream(NumberStream):
    """In an order that its generator draws, which the Trainer seeds for every epoch."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.samples, generator=self.generator).tolist()
        yield from (Numbers(self.samples)[index] for index in order)


class StatefulStream(NumberStream):
    """Has a position that can be saved and restored."""

    next = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.next, self.samples):
            self.next = index + 1
            yield Numbers(self.samples)[index]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Curve(nn.Module):
    """A small model that notes the samples that it was trained on.

    Args:
        width: of the hidden layer.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += [round(number) for number in x.float().flatten().tolist()]
        scaled = (x / SAMPLES).to(self.out.weight.dtype)
        found = self.out(torch.tanh(self.hidden(scaled))).float()
        return {"loss": nn.functional.mse_loss(found, labels.float())}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of numbers; the targets are a curve over them."""
    x = torch.tensor([[row["x"]] for row in rows])
    return {"x": x, "labels": torch.sin(x / 5)}


@dataclass
class Ran:
    """What one rank saw in a run.

    Attributes:
        seen: the samples that this rank was trained on, in order.
        losses, rates: of every logged step of the whole run.
        logged: these steps.
        weights: at the end.
        step: where the run ended.
        max_steps: its length.
        text: what was printed.
        metrics: of the result.
    """

    seen: list[int]
    losses: list[float]
    rates: list[float]
    logged: list[int]
    weights: dict[str, torch.Tensor]
    step: int
    max_steps: int
    text: str
    metrics: dict[str, float]


def arguments_of(output_dir: str, **changes: Any) -> TrainingArguments:
    """Arguments of a run of single steps that keeps all its checkpoints. None leaves one at its default."""
    values: dict[str, Any] = dict(
        per_device_train_batch_size=4,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        self_test="never",
    )
    given = {name: value for name, value in {**values, **changes}.items() if value is not None}
    return TrainingArguments(output_dir, **given)


def trainer_of(
    output_dir: str, data: Any = None, width: int = 8, optimizer: Any = None, callbacks: Any = (), **changes: Any
) -> Trainer:
    """A trainer of a :class:`Curve`."""
    args = arguments_of(output_dir, remove_unused_columns=False, **changes)
    more = {} if optimizer is None else {"optimizer_cls_and_kwargs": (optimizer, {"lr": 0.01})}
    dataset = Numbers() if data is None else data
    return Trainer(Curve(width), args, train_dataset=dataset, data_collator=collate, callbacks=list(callbacks), **more)


def run(output_dir: str, resume: Any = None, **changes: Any) -> Ran:
    """Train on this rank."""
    trainer = trainer_of(output_dir, **changes)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        output = trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    ran = Ran(
        list(trainer.model.seen),
        [entry["loss"] for entry in logs],
        [entry["learning_rate"] for entry in logs],
        [entry["step"] for entry in logs],
        whole_weights(trainer),
        output.global_step,
        trainer.state.max_steps,
        printed.getvalue(),
        output.metrics,
    )
    trainer.engine.close()
    return ran

"""Scripts of further kinds, as in ``test_script_shapes.py``: weights in a forward pass, losses, loaders, dtypes."""

from __future__ import annotations

import gc
import importlib
import logging
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import ds_trainer
from ds_trainer import ConfigError
from tests.support.compare import weight_distance
from tests.support.pool import pool
from tests.training.test_own_steps import Classifier, Step, rows
from tests.training.test_script_shapes import ANY, LAST, compare, ours, theirs


class PenaltyInForward(Classifier):
    """Reads weights in the forward pass, without the modules that have them; also of one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        outputs = super().forward(x, labels)
        with torch.no_grad():
            norm = sum(parameter.norm() for parameter in self.first.parameters())
        outputs["loss"] = outputs["loss"] * norm + 0 * sum(weight.sum() for weight in self.unused.parameters())
        return outputs


class OfPenalty:
    refused: ClassVar = (LAST, "`module.weight` is gathered there, `module.parameters()` is not")
    model = PenaltyInForward


class OfRows:
    """transformers fails, too: gradients are for scalars."""

    refused: ClassVar = (ANY, "The loss has the shape")
    alone = True

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        return F.cross_entropy(model(**inputs)["logits"], inputs["labels"], reduction="none")


class OwnLoader:
    """Its batch sampler has an epoch; accelerate wraps it on several ranks, and forgets to call it there."""

    def get_train_dataloader(self: Any) -> Any:
        loader = DataLoader(rows(16), batch_sampler=Batches(self.args.per_device_train_batch_size))
        return self.accelerator.prepare(loader)


class Batches:
    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16 // self.size

    def __iter__(self) -> Any:
        order = torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[start : start + self.size] for start in range(0, 16, self.size)])


@pytest.mark.parametrize("shape", [OfPenalty, OfRows, OwnLoader])
def test_the_weights_are_those_of_one_process_or_the_shape_is_refused(shape: Any, tmp_path: Any) -> None:
    compare(shape, 2, tmp_path)


def double(folder: str, stage: int) -> Any:
    args = ds_trainer.TrainingArguments(folder, max_steps=2, use_cpu=True, disable_tqdm=True, zero_stage=stage)
    with pytest.raises(ConfigError, match=r"first.weight, first.bias, .* of Classifier are float64"):
        ds_trainer.Trainer(Classifier().double(), args, train_dataset=rows(8)).train()


def test_float64_is_one_error_where_deepspeed_divides_it(tmp_path: Any) -> None:
    pool(2).run(double, str(tmp_path), 0)
    double(str(tmp_path), 2)


def evaluated(folder: str) -> None:
    args = ds_trainer.TrainingArguments(folder, use_cpu=True, disable_tqdm=True, zero_stage=3)
    with pytest.raises(ConfigError, match="is gathered there, `module"):
        ds_trainer.Trainer(PenaltyInForward(), args, eval_dataset=rows(8)).evaluate()


def test_an_evaluation_without_a_training_refuses_weights_that_are_not_gathered(tmp_path: Any) -> None:
    pool(2).run(evaluated, str(tmp_path))


class Moved(Step):
    """Sharpness-aware: moves the weights by a gradient that is never in a parameter, and back."""

    def passes(self: Any, model: Any, inputs: Any, items: Any) -> Any:
        parameters, steps = list(self.model.parameters()), self.args.gradient_accumulation_steps
        loss = self.compute_loss(model, inputs) / steps
        slopes = torch.autograd.grad(loss, parameters)
        for sign in (1, -1):
            with torch.no_grad():
                torch._foreach_add_(parameters, slopes, alpha=0.5 * sign)
            if sign > 0:
                self.accelerator.backward(self.compute_loss(model, inputs) / steps)
        return loss.detach()


def moved(folder: str, stage: int) -> tuple[list[str], Any]:
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("ds_trainer.engine.backward_passes")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        found = ours(Moved, folder, 1, torch.distributed.get_world_size(), stage)
    finally:
        logger.removeHandler(handler)
    return lines, found


def test_a_gradient_of_one_rank_is_said(tmp_path: Any) -> None:
    """What is computed from it depends on the layout; ZeRO 3 has no weights to move."""
    wanted = pool(1).run(theirs, Moved, str(tmp_path / "theirs"), 1)[0]
    for stage in (0, 2):
        lines, found = pool(1).run(moved, str(tmp_path / "alone"), stage)[0]
        assert lines == [] and weight_distance(found, wanted) < 1e-5
    lines, found = pool(2).run(moved, str(tmp_path / "two"), 2)[0]
    assert lines[0].startswith("training_step computes the gradient of first.weight with torch.autograd.grad")
    assert len(lines) == 1 and weight_distance(found, wanted) > 1e-5
    assert "ZeRO 3 has only a part of each weight" in pool(2).run(moved, str(tmp_path / "three"), 3)[0][1]


def several(folder: str, kind: str, stage: int | None = None) -> list[float]:
    """Trainers of one model object in a process, and weights that are loaded between trainings."""
    library: Any = importlib.import_module("transformers" if stage is None else "ds_trainer")
    changes = {} if stage is None else {"zero_stage": stage, "per_device_train_batch_size": 2}
    model, rates = Classifier(), (0.3, 0.1)
    made: list[Any] = []
    start = {name: value.clone() for name, value in model.state_dict().items()}
    values: dict[str, Any] = dict(max_steps=2, optim="sgd", logging_steps=1, use_cpu=True, disable_tqdm=True)
    values |= dict(report_to="none", save_strategy="no", per_device_train_batch_size=4, max_grad_norm=0.0)
    for rate in rates if kind != "loaded" else rates[:1]:
        args = library.TrainingArguments(f"{folder}/{rate}", learning_rate=rate, **{**values, **changes})
        made.append(library.Trainer(model, args, train_dataset=rows(16), eval_dataset=rows(5)))
    losses: list[float] = []
    for number in {"in a row": (0, 1), "in turn": (0, 1, 0), "deleted": (0, 1), "loaded": (0, 0)}[kind]:
        made[number].train()
        losses += [entry["loss"] for entry in made[number].state.log_history if "loss" in entry]
        if kind == "loaded":
            model.load_state_dict(start)
        if kind == "deleted":
            made[number] = None
            gc.collect()
        else:
            losses.append(made[0].evaluate()["eval_loss"])
    return losses


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["in a row", "in turn", "deleted", "loaded"])
def test_one_model_has_several_trainers(kind: str, tmp_path: Any) -> None:
    """The hooks of both engines ran: an error at ZeRO 0 to 2, and a wrong shard of loaded weights at ZeRO 3."""
    wanted = pool(1).run(several, str(tmp_path), kind)[0]
    for stage in range(4):
        for found in pool(2).run(several, str(tmp_path), kind, stage):
            assert found == pytest.approx(wanted, rel=1e-5), stage

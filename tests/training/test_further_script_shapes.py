"""Scripts of further kinds, as in ``test_script_shapes.py``: weights in a forward pass, losses, loaders, dtypes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import ds_trainer
from ds_trainer import ConfigError
from tests.support.pool import pool
from tests.training.test_own_steps import Classifier, rows
from tests.training.test_script_shapes import ANY, LAST, compare


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

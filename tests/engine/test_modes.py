"""An engine has the mode of its module, as scripts expect of the ``model`` that they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool


class _ByMode(Trainer):
    """Counts calls by mode, and uses what ``eval()`` and ``train()`` return."""

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        self.calls = {"train": 0, "eval": 0}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert model.training == self.model.training == self.model_wrapped.training
        self.calls["train" if model.training else "eval"] += 1
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model = model.eval()
        assert not (model.training or self.model.training)
        model = model.train()
        assert model.training
        return super().training_step(model, inputs, num_items_in_batch)


def _calls(output_dir: str, stage: int) -> list[dict[str, int]]:
    args = TrainingArguments(
        output_dir=output_dir, max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        zero_stage=stage, save_strategy="no", report_to="none", disable_tqdm=True
    )  # fmt: skip
    rows = regression_rows(8)
    trainer, found = _ByMode(Regression(), args, train_dataset=rows, eval_dataset=rows), []
    for do in (trainer.evaluate, trainer.train, trainer.evaluate, lambda: trainer.predict(rows), trainer.train):
        do()
        found.append(trainer.calls)
        trainer.calls = {"train": 0, "eval": 0}
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_is_in_evaluation_mode_in_evaluations(stage: int, tmp_path: Any) -> None:
    evaluation, training = {"train": 0, "eval": 2}, {"train": 2, "eval": 0}
    for found in pool(2).run(_calls, str(tmp_path), stage):
        assert found == [evaluation, training, evaluation, evaluation, training]

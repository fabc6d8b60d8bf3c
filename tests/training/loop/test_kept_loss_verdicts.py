"""What a loss is the mean of is kept in checkpoints: a resumed run weights its losses as before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.loop.batch_splitting import samples_of_batch
from ds_trainer.training.loop.loss_measurement import LossMeasurement, weighting_from
from ds_trainer.training.loop.loss_rule import loss_in, loss_rule_of
from tests.support.loss_functions import Head, ctc
from tests.training.loop.test_measured_losses import BY_NAME, measured


def test_a_checkpoint_keeps_what_the_loss_is_the_mean_of(caplog: pytest.LogCaptureFixture) -> None:
    """The batch after a resume cannot tell, or the loss is another one now: it is said."""
    case = BY_NAME["CTC, mean"]
    torch.manual_seed(1)
    batch, model = case.batch(), case.model()
    items = loss_rule_of(model, ["labels"]).count
    found = measured(case, model, batch)
    kept = found.to_json()
    assert kept is not None and str(weighting_from(kept, items).count) == "samples"
    alike = {"x": batch["x"], "labels": torch.randint(1, 5, (6, 3))}

    def loss_of(part: Any) -> torch.Tensor:
        return loss_in(model(**part), model, part)

    assert str(LossMeasurement(loss_of, model, alike, items).weighting().count) == "items"
    again = LossMeasurement(loss_of, model, alike, items).weighting(kept)
    assert (str(again.count), again.settled) == ("samples", True)
    one = samples_of_batch(batch, [0])
    assert str(LossMeasurement(loss_of, model, one, items).weighting(kept).count) == "samples"
    logging.getLogger("ds_trainer").propagate = True
    model = Head(ctc("sum"))
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        assert LossMeasurement(loss_of, model, batch, items).weighting(kept).summed
    assert "is not what it was when the checkpoint was written (weighted by samples)" in caplog.text


class Resumed(torch.utils.data.Dataset[Any]):
    """CTC samples; those after the eighth have labels of one length."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.rows = [{"x": torch.randn(30, 4) * (1 + row), "labels": torch.randint(1, 5, (8,))} for row in range(16)]
        for row in range(16):
            self.rows[row]["labels"][1 + (row if row < 8 else 3) :] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_a_resumed_run_weights_its_losses_as_before(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=4, save_steps=2, use_cpu=True, disable_tqdm=True,
        report_to="none", train_sampling_strategy="sequential"
    )  # fmt: skip
    rules = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = Trainer(Head(ctc("mean")), args, train_dataset=Resumed())
        trainer.train(checkpoint)
        rules.append(trainer._ds_trainer.losses.rule)
        trainer.engine.close()
    assert [str(rule.weighting.count) for rule in rules] == ["samples", "samples"]
    assert rules[0].kept is None and rules[1].kept == rules[0].weighting.to_json()

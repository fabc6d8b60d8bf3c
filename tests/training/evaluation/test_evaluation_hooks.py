"""Hooks of evaluation and prediction: overridden with the signatures of transformers, called, reported, rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback
from ds_trainer.utils.errors import ConfigError
from tests.support.predictions import arguments, class_rows, describe, make


class Notes(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("step")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("log")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.events.append(f"evaluate {sorted(n for n in metrics if 'second' not in n and 'time' not in n)}")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.events.append(f"predict {'test_loss' in metrics}")


class EveryHook(Trainer):
    """Overrides each hook of evaluation with the reference's signature, and hands on."""

    calls: list[str]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self.calls = [*getattr(self, "calls", []), "get_eval_dataloader"]
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        self.calls.append("get_test_dataloader")
        return super().get_test_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        self.calls.append(f"evaluation_loop {description} {prediction_loss_only} {ignore_keys} {metric_key_prefix}")
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        self.calls.append(f"prediction_step {prediction_loss_only}")
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, None if logits is None else logits[0] * 2, labels

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.calls.append(f"compute_loss {return_outputs}")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_overridden_hooks_are_called_with_the_signature_of_transformers(tmp_path: Path) -> None:
    notes = Notes()
    trainer = make("tuple", tmp_path, 3, cls=EveryHook)
    trainer.add_callback(notes)
    metrics = trainer.evaluate(ignore_keys=["k"])
    step = ["prediction_step True", "compute_loss False"]
    assert trainer.calls == ["get_eval_dataloader", "evaluation_loop Evaluation True ['k'] eval", *step * 2]
    assert notes.events == ["step", "step", "log", "evaluate ['epoch', 'eval_items', 'eval_loss']"]
    assert "eval_loss" in metrics

    trainer.calls, notes.events = [], []
    found = trainer.predict(class_rows(3), metric_key_prefix="test")
    step = ["prediction_step False", "compute_loss True"]
    assert trainer.calls == ["get_test_dataloader", "evaluation_loop Prediction None None test", *step * 2]
    assert notes.events == ["step", "step", "predict True"]
    plain = make("tuple", tmp_path, 0).predict(class_rows(3))
    np.testing.assert_allclose(found.predictions, 2 * plain.predictions[0], rtol=1e-6)

    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert output.num_samples == len(output.label_ids) == 3 and "eval_loss" in output.metrics


class LossOfItsOwn(Trainer):
    """A loss over a model that takes no labels: contrastive, say."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(inputs["x"])
        loss = outputs.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class OldStyle(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
        return model(**inputs)[0]


class Careless(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        return model(**inputs)[0]


def test_compute_loss_without_labels_and_with_an_old_signature(tmp_path: Path) -> None:
    data = [{"x": row["x"]} for row in class_rows(5)]
    model = nn.Linear(5, 3)
    found = LossOfItsOwn(model, arguments(tmp_path, remove_unused_columns=False)).predict(data)
    wanted = model(torch.stack([row["x"] for row in data])).detach()
    np.testing.assert_allclose(found.predictions, wanted.numpy(), rtol=1e-5)
    assert found.metrics["test_loss"] == pytest.approx(float(wanted.pow(2).mean()), rel=1e-5)

    old = make("tuple", tmp_path, 3, cls=OldStyle)
    assert old.evaluate()["eval_loss"] == pytest.approx(make("tuple", tmp_path, 3).evaluate()["eval_loss"], rel=1e-5)
    with pytest.raises(ConfigError, match=r"OldStyle\.compute_loss takes no return_outputs"):
        old.predict(class_rows(3))
    with pytest.raises(ConfigError, match=r"Careless\.compute_loss ignores return_outputs, but predictions are needed"):
        make("tuple", tmp_path, 3, cls=Careless).predict(class_rows(3))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (lambda d: make("tuple", d, 3, metrics=lambda found: 0.5).evaluate(), "compute_metrics returned a float"),
        (lambda d: make("tuple", d, 3, batch_eval_metrics=True), "there is no compute_metrics"),
        (lambda d: make("tuple", d, 3, batch_eval_metrics=True, metrics=describe), "no such argument"),
        (lambda d: make("tuple", d, 3, include_for_metrics=["loss"]), "there is no compute_metrics"),
        (lambda d: make("tuple", d, 3, include_for_metrics=["logits"]), "'logits' is neither 'inputs' nor 'loss'"),
        (
            lambda d: make("tuple", d, 3).evaluate("other"),
            "'other' is not an evaluation dataset of the Trainer; known: none",
        ),
        (lambda d: make("tuple", d, 0).predict([]), "test_dataset is empty"),
        (lambda d: make("nested", d, 0).predict(class_rows(2), ignore_keys=[]), "is a object, which cannot be"),
    ],
)
def test_invalid_evaluations_are_rejected_with_a_message(job: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        job(tmp_path)

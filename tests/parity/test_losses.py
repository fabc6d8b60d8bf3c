"""Losses of every style, beside transformers' Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.library import Library, assert_same, both, trained
from tests.support.models import PlainLanguageModel, Regression, regression_rows, tiny_llama

ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def own_loss(base: Any) -> Any:
    """The example of the early reference: a custom loss with the signature of that version."""

    class MyTrainer(base):  # type: ignore[misc]
        model_accepts_loss_kwargs = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs[0]
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    return MyTrainer


def scaled_loss(base: Any) -> Any:
    """Calls the inherited loss and changes it."""

    class MyTrainer(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 3.0 * super().compute_loss(model, inputs, *args, **kwargs)

    return MyTrainer


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A function for ``compute_loss_func``."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


LOSSES: dict[str, dict[str, Any]] = {
    "the model's, normalized over the window": {"changes": ACCUMULATED},
    "inherited and changed": {"changes": ACCUMULATED, "base": scaled_loss},
    "compute_loss_func": {"changes": ACCUMULATED, "compute_loss_func": summed},
    "clipped": {"changes": {"max_grad_norm": 0.1}},
    "decayed": {"changes": {"weight_decay": 0.5, "learning_rate": 0.05}},
    "tied weights": {"model": lambda: tiny_llama(tied=True)},
    "recomputed activations": {"changes": {"gradient_checkpointing": True}},
    "recomputed, re-entrant": {
        "changes": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    },
    "bfloat16 evaluation batch": {"changes": {"per_device_train_batch_size": 8}},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        given = dict(LOSSES[name])
        if "model" in given:
            given["model"] = given["model"]()
        return trained(library.trainer(given.pop("changes", None), given.pop("base", None), **given))

    assert_same(*both(script, tmp_path))


def test_the_example_of_the_early_reference(tmp_path: Path) -> None:
    """A mean of one micro-batch a step: here both normalise alike."""
    assert_same(*both(lambda library: trained(library.trainer(base=own_loss)), tmp_path))


class TupleModel(nn.Module):
    """Returns ``(loss, logits)``, knows nothing of transformers, and takes two kinds of labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, label_a: torch.Tensor, label_b: torch.Tensor) -> Any:
        a, b = self.layer(x).unbind(-1)
        return F.mse_loss(a, label_a) + F.mse_loss(b, label_b), torch.stack([a, b], -1)


def two_labels(samples: int) -> list[dict[str, torch.Tensor]]:
    rows = regression_rows(samples)
    return [{"x": row["x"], "label_a": row["labels"], "label_b": -row["labels"]} for row in rows]


MODELS: dict[str, Any] = {
    "a tuple": lambda: {"model": Regression(), "train_dataset": regression_rows(16)},
    "a dict": lambda: {"model": PlainLanguageModel()},
    "several labels": lambda: {
        "model": TupleModel(),
        "train_dataset": two_labels(16),
        "changes": {"label_names": ["label_a", "label_b"]},
    },
    "a ModelOutput": lambda: {"model": tiny_llama(seed=5)},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind(name: str, tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        given = MODELS[name]()
        return trained(library.trainer({"max_steps": 4, **given.pop("changes", {})}, **given))

    assert_same(*both(script, tmp_path))

"""Losses of every style, beside transformers' Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ds_trainer
from tests.parity.library import Library, assert_same, both, logs, trained
from tests.support.models import PlainLanguageModel, Regression, regression_rows, tiny_llama


def scaled_loss(base: Any) -> Any:
    """Calls the inherited loss and changes it."""

    class MyTrainer(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 3.0 * super().compute_loss(model, inputs, *args, **kwargs)

    return MyTrainer


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


RUNS: dict[str, Any] = {
    "inherited and changed": lambda: {
        "changes": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        "base": scaled_loss,
    },
    "clipped": lambda: {"changes": {"max_grad_norm": 0.1}},
    "tied weights": lambda: {"model": tiny_llama(tied=True)},
    "recomputed, re-entrant": lambda: {
        "changes": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    },
    "a tuple": lambda: {"model": Regression(), "train_dataset": regression_rows(16)},
    "a dict": lambda: {"model": PlainLanguageModel()},
    "several labels": lambda: {
        "model": TupleModel(),
        "train_dataset": two_labels(16),
        "changes": {"label_names": ["label_a", "label_b"]},
    },
    "a ModelOutput": lambda: {"model": tiny_llama(seed=5)},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", RUNS)
def test_losses_of_models_of_every_kind(name: str, tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        given = RUNS[name]()
        return trained(library.trainer(given.pop("changes", None), given.pop("base", None), **given))

    assert_same(*both(script, tmp_path))


def test_a_run_of_transformers_is_extended(tmp_path: Path) -> None:
    """Four steps there, eight in all: the rates are those of eight steps, from the first resumed one on."""
    import transformers

    (tmp_path / "theirs").mkdir()
    theirs = Library(transformers, tmp_path / "theirs").trainer({"save_strategy": "steps", "save_steps": 4})
    theirs.train()
    ours = Library(ds_trainer, tmp_path / "ours").trainer({"max_steps": 8})
    ours.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
    rates = [entry["learning_rate"] for entry in logs(ours)]
    assert rates[4:] == pytest.approx([1e-2 * (8 - step) / 8 for step in range(4, 8)])
    assert ours.state.global_step == 8
    ours.engine.close()

"""The batches of an evaluation are those of one process: what a loss of their samples with each other needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer
from tests.support.pool import pool
from tests.support.predictions import arguments

SIZES, BATCHES = range(1, 21), (1, 2, 3)


class Contrastive(nn.Module):
    """Each sample against the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, q: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        z = self.layer(q)
        return {"loss": F.cross_entropy(z @ z.T, torch.arange(len(z))), "logits": z}


class Classifier(Contrastive):
    """A mean over samples."""

    def forward(self, q: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        z = self.layer(q)
        return {"loss": F.cross_entropy(z, labels), "logits": z}


MODELS: dict[str, type[Contrastive]] = {"contrastive": Contrastive, "classifier": Classifier}


def rows(kind: str, samples: int) -> list[dict[str, Any]]:
    qs = torch.randn(max(SIZES), 4, generator=torch.Generator().manual_seed(1))
    labels = {"labels": 1} if kind == "classifier" else {}
    return [{"q": q, **labels} for q in qs[:samples]]


def collate(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    batch: dict[str, Any] = {"q": torch.stack([row["q"] for row in found])}
    return (
        {**batch, "labels": torch.ones(len(found), dtype=torch.long)}
        if kind == "classifier"
        else {**batch, "return_loss": True}
    )


def total(found: Any) -> dict[str, float]:
    return {"sum": float(np.sum(found.predictions)), "rows": len(found.predictions)}


def evaluations(kind: str, directory: str) -> dict[tuple[int, int], tuple[float, float, int, Any]]:
    """By batch and size: loss, a metric, rows, and the predictions."""
    found = {}
    for batch in BATCHES:
        args = arguments(directory, per_device_eval_batch_size=batch, remove_unused_columns=False)
        trainer = Trainer(MODELS[kind](), args, data_collator=partial(collate, kind=kind), compute_metrics=total)
        for size in SIZES:
            result = trainer.predict(rows(kind, size))
            metrics = result.metrics
            key = batch, size
            counted = metrics.get("test_rows", size)  # without labels there are no metrics, as with transformers
            found[key] = metrics["test_loss"], metrics.get("test_sum"), counted, result.predictions
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_predictions_are_those_of_one_process(kind: str, ranks: int, tmp_path: Path) -> None:
    model = MODELS[kind]()
    for found in pool(ranks).run(evaluations, kind, str(tmp_path), timeout=120):
        for (batch, size), (loss, metric, count, predictions) in found.items():
            data, wanted, logits = rows(kind, size), 0.0, []
            for start in range(0, size, batch):
                part = data[start : start + batch]
                with torch.no_grad():
                    outputs = model(**collate(part, kind))
                wanted += outputs["loss"].item() * len(part) / size
                logits.append(outputs["logits"].numpy())
            assert count == size
            np.testing.assert_allclose(predictions, np.concatenate(logits), rtol=1e-5, atol=1e-6)
            assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6), (batch, size)
            assert metric is None or metric == pytest.approx(float(np.sum(np.concatenate(logits))), rel=1e-4, abs=1e-5)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    import transformers

    for size in (4, 7, 10):
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        data, of = rows("contrastive", size), partial(collate, kind="contrastive")
        theirs = transformers.Trainer(Contrastive(), args, data_collator=of).evaluate(data)["eval_loss"]
        mine = Trainer(
            Contrastive(),
            arguments(tmp_path, per_device_eval_batch_size=2, remove_unused_columns=False),
            data_collator=of,
        )
        assert mine.evaluate(data)["eval_loss"] == pytest.approx(theirs, rel=1e-5)

"""Host memory of an evaluation: streamed metrics hold nothing, predictions are held once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer
from ds_trainer.training.evaluation import evaluation_loop as eval_loop
from ds_trainer.training.evaluation.nested import concatenate, to_numpy
from ds_trainer.training.evaluation.prediction_accumulator import PredictionAccumulator
from tests.support.memory import MB, peak_of
from tests.support.pool import WorkerPool
from tests.support.predictions import arguments

ROWS, CLASSES, BATCH = 1024, 16384, 8
TOTAL = ROWS * CLASSES * 4  # bytes of all predictions: 64 MiB
BUDGET = TOTAL // 4


class Wide(nn.Module):
    """Few weights, many classes."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = x * self.weight
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Hits:
    """Adds up hits, batch by batch or at once."""

    def __init__(self) -> None:
        self.hits = self.rows = 0

    def __call__(self, found: Any, compute_result: bool = True) -> dict[str, float]:
        self.rows += len(found.label_ids)
        self.hits += int((found.predictions.argmax(-1) == found.label_ids).sum())
        return {"hits": self.hits, "rows": self.rows}


class Collected(PredictionAccumulator):
    """Negative control: batches in a list, and a copy of them all at the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pieces: list[Any] = []

    def add(self, batch: Any, places: Any = None) -> None:
        if batch is not None:
            self.pieces.append(to_numpy(batch))

    def result(self) -> Any:
        return concatenate(self.pieces) if self.pieces else None


def peaks(output_dir: str) -> dict[str, tuple[int, float]]:
    """Bytes at the peak and the number of rows that metrics saw, of evaluations of the same set."""
    rows = [{"x": torch.tensor([float(i % 7 - 3)]), "labels": (CLASSES - 1) * (i % 2)} for i in range(ROWS)]
    found: dict[str, tuple[int, float]] = {}

    def measure(name: str, size: int = ROWS, **changes: Any) -> None:
        args = arguments(output_dir, per_device_eval_batch_size=BATCH, **changes)
        trainer = Trainer(Wide(), args, eval_dataset=rows[:size], compute_metrics=Hits())
        metrics: dict[str, float] = {}
        peak = peak_of(lambda: metrics.update(trainer.evaluate()))
        found[name] = peak, metrics["eval_rows"]

    measure("first", size=2 * BATCH)  # what every first evaluation loads
    measure("streamed", batch_eval_metrics=True)
    measure("held")
    eval_loop.PredictionAccumulator = Collected  # type: ignore[misc]
    measure("collected")
    return found


def test_predictions_larger_than_the_memory_budget_are_streamed(tmp_path: Path) -> None:
    """Predictions of four times the budget: streamed they stay below it, held they take their size and no more."""
    fresh = WorkerPool(1)
    (found,) = fresh.run(peaks, str(tmp_path))
    fresh.close()
    report = {name: f"{peak / MB:.1f} MiB" for name, (peak, _) in found.items()}
    assert all(found[name][1] == ROWS for name in ("streamed", "held", "collected"))
    assert found["streamed"][0] < BUDGET, report
    assert TOTAL < found["held"][0] < TOTAL + BUDGET, report
    assert found["collected"][0] > 2 * TOTAL - BUDGET, report  # the control: nothing of this goes without saying

"""The results of evaluation and prediction, and the argument of ``compute_metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

RUNTIME_METRICS = ("items", "model_preparation_time", "runtime", "samples_per_second", "steps_per_second")
"""Metrics of the evaluation rather than of the model, without their prefix."""


class EvalPrediction:
    """The result of a pass over a dataset: the argument of ``compute_metrics``.

    Every array has one row per sample, in the dataset's order; several outputs or labels are a tuple (or dict) of
    arrays. It unpacks like a tuple: predictions, labels, and then inputs and losses if present. With
    ``batch_eval_metrics`` it has tensors on the device, of one batch of all ranks.

    Args:
        predictions: outputs of the model without its loss.
        label_ids: labels.
        inputs: main input of the model; only with ``include_for_metrics=["inputs"]``.
        losses: for each sample the mean loss of its batch; only with ``include_for_metrics=["loss"]``.

    Source of names and order: transformers 5, ``transformers.EvalPrediction``.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements = (predictions, label_ids, *(part for part in (inputs, losses) if part is not None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, idx: int) -> Any:
        if not 0 <= idx < len(self.elements):
            raise IndexError(f"index {idx} is out of range: there are {len(self.elements)} elements")
        return self.elements[idx]


class EvalLoopOutput(NamedTuple):
    """What ``Trainer.evaluation_loop`` returns.

    ``predictions`` and ``label_ids`` are numpy arrays (see :class:`EvalPrediction`), or None if there are none or only
    the loss was requested. ``num_samples`` counts every sample of the dataset once.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What ``Trainer.predict`` returns; the fields are those of :class:`EvalLoopOutput`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None

"""What evaluation and prediction return, and what ``compute_metrics`` is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

ABOUT_ITSELF = ("items", "model_preparation_time", "runtime", "samples_per_second", "steps_per_second")
"""What an evaluation says of itself rather than of the model, after the prefix of its metrics."""


class EvalPrediction:
    """The whole result of a pass over a dataset: what ``compute_metrics`` is called with.

    Every array has one row for each sample, in the dataset's order; an output or a batch of several tensors is a
    tuple (or dict) of arrays. It unpacks like a tuple: predictions, labels, and then those of the others that are
    there. With ``batch_eval_metrics`` the arrays are tensors on the device, of one batch of all ranks.

    Args:
        predictions: outputs of the model without its loss.
        label_ids: labels.
        inputs: main input of the model; with ``include_for_metrics=["inputs"]`` only.
        losses: for each sample the mean loss of its batch; with ``include_for_metrics=["loss"]`` only.

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
            raise IndexError(f"there are {len(self.elements)} elements, counted from 0; asked for {idx}")
        return self.elements[idx]


class EvalLoopOutput(NamedTuple):
    """What ``Trainer.evaluation_loop`` returns.

    ``predictions`` and ``label_ids`` hold numpy arrays (see :class:`EvalPrediction`), None where there are none or
    the loss alone was asked for. ``num_samples`` counts every sample of the dataset once.
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

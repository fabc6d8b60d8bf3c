"""predict(): what it returns with and without labels."""

from __future__ import annotations

from typing import Any

import torch

from tests.behaviors.api import Api
from tests.behaviors.topics.evaluation import _accuracy, _classifier
from tests.support.models import Regression, regression_rows
from tests.support.saved_models import Labelled


def fields_of_the_output(api: Api) -> Any:
    output = _classifier(api).predict(Labelled(6))
    predictions, labels, metrics = output
    return [output._fields, predictions.shape, labels.shape, metrics is output.metrics]


def keys_of_the_metrics(api: Api) -> Any:
    return set(_classifier(api).predict(Labelled(6)).metrics) - {"test_items"}


def all_keys_of_the_metrics(api: Api) -> Any:
    return set(_classifier(api).predict(Labelled(6)).metrics)


def values(api: Api) -> Any:
    output = _classifier(api).predict(Labelled(6))
    return [output.predictions, output.label_ids, output.metrics["test_accuracy"]]


def prefix(api: Api) -> Any:
    found = _classifier(api).predict(Labelled(6), metric_key_prefix="predict").metrics
    return [found["predict_accuracy"], "predict_runtime" in found]


def without_labels(api: Api) -> Any:
    class Optional(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            prediction = self.layers(x).squeeze(-1)
            found = {"prediction": prediction}
            return found if labels is None else {"loss": ((prediction - labels) ** 2).mean(), **found}

    rows = [{"x": row["x"]} for row in regression_rows(5)]
    output = api.plain_trainer(model=Optional()).predict(rows)
    return [output.predictions.shape, output.label_ids, sorted(output.metrics)]


def rows_of_different_lengths(api: Api) -> Any:
    import numpy as np

    rows = [{"input_ids": [3] * length, "labels": [3] * length} for length in (2, 2, 2, 2, 4, 4, 4, 4)]
    output = api.text_trainer().predict(rows)
    return [output.predictions.shape, output.label_ids, bool(np.all(output.predictions[:4, 2:] == -100))]


def predictions_are_arrays(api: Api) -> Any:
    output = _classifier(api).predict(Labelled(6))
    return [type(output.predictions).__name__, str(output.predictions.dtype), type(output.label_ids).__name__]


def prediction_does_not_log(api: Api) -> Any:
    trainer = _classifier(api)
    trainer.predict(Labelled(6))
    return trainer.state.log_history


def several_outputs_are_a_tuple(api: Api) -> Any:
    class Two(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            loss, prediction = super().forward(x, labels)
            return loss, prediction, torch.stack([prediction, prediction], dim=1)

    output = api.evaluated_trainer(model=Two()).predict(regression_rows(5))
    return [type(output.predictions).__name__, [part.shape for part in output.predictions]]


def several_labels_are_a_tuple(api: Api) -> Any:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 2)

        def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None) -> Any:
            logits = self.layer(x).sum(-1)
            return {"loss": (logits - start_positions - end_positions).pow(2).mean(), "logits": logits}

    rows = [{"x": row["x"], "start_positions": 1, "end_positions": 2} for row in regression_rows(5)]
    torch.manual_seed(0)
    changes = {"label_names": ["start_positions", "end_positions"]}
    output = api.plain_trainer(changes, model=Two(), train_dataset=rows).predict(rows)
    return [type(output.label_ids).__name__, len(output.label_ids), output.predictions.shape]


def after_training(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    trainer.train()
    return trainer.predict(regression_rows(5, seed=4)).predictions


def metrics_are_computed(api: Api) -> Any:
    return _accuracy(_classifier(api).predict(Labelled(6))[:2])

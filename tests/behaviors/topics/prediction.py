"""predict(): what it returns with and without labels."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api
from tests.behaviors.topics.evaluation import _classifier
from tests.support.models import regression_rows
from tests.support.saved_models import Labelled


def fields_of_the_output(api: Api) -> Any:
    output = _classifier(api).predict(Labelled(6))
    predictions, labels, metrics = output
    return [output._fields, predictions.shape, labels.shape, metrics is output.metrics]


def keys_of_the_metrics(api: Api) -> Any:
    return set(_classifier(api).predict(Labelled(6)).metrics) - {"test_items"}


def all_keys_of_the_metrics(api: Api) -> Any:
    return set(_classifier(api).predict(Labelled(6)).metrics)


def prefix(api: Api) -> Any:
    found = _classifier(api).predict(Labelled(6), metric_key_prefix="predict").metrics
    return [found["predict_accuracy"], "predict_runtime" in found]


def predictions_are_arrays(api: Api) -> Any:
    output = _classifier(api).predict(Labelled(6))
    return [type(output.predictions).__name__, str(output.predictions.dtype), type(output.label_ids).__name__]


def prediction_does_not_log(api: Api) -> Any:
    trainer = _classifier(api)
    trainer.predict(Labelled(6))
    return trainer.state.log_history


def after_training(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    trainer.train()
    return trainer.predict(regression_rows(5, seed=4)).predictions

"""evaluate(): results, metrics, inputs of compute_metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.behaviors.api import Api
from tests.support.models import Regression, regression_rows
from tests.support.saved_models import Labelled, _model


def _accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def _classifier(api: Api, changes: Any = None, **given: Any) -> Any:
    torch.manual_seed(0)
    given = {"eval_dataset": Labelled(10), "compute_metrics": _accuracy, **given}
    return api.trainer(changes, model=_model("bert classifier"), train_dataset=Labelled(16), **given)


def keys_of_the_result(api: Api) -> Any:
    return set(api.evaluated_trainer().evaluate()) - {"eval_items"}


def all_keys_of_the_result(api: Api) -> Any:
    return set(api.evaluated_trainer().evaluate())


def loss_of_batches_of_one_size(api: Api) -> Any:
    return api.plain_trainer(eval_dataset=regression_rows(8, seed=1)).evaluate()["eval_loss"]


def loss_with_an_incomplete_batch(api: Api) -> Any:
    return api.evaluated_trainer().evaluate()["eval_loss"]


def loss_of_ragged_tokens(api: Api) -> Any:
    from tests.support.models import RaggedTokens

    return api.text_trainer(eval_dataset=RaggedTokens(9, seed=3)).evaluate()["eval_loss"]


def accuracy_of_a_classifier(api: Api) -> Any:
    found = _classifier(api).evaluate()
    return [found["eval_accuracy"], found["eval_loss"]]


def epoch_of_an_evaluation_before_training(api: Api) -> Any:
    found = api.evaluated_trainer().evaluate()
    return [found["epoch"], type(found["epoch"]).__name__]


def prefix(api: Api) -> Any:
    return sorted(key for key in _classifier(api).evaluate(metric_key_prefix="test") if key.startswith("test_acc"))


def names_that_have_the_prefix_already(api: Api) -> Any:
    found = _classifier(api, compute_metrics=lambda p: {"eval_f1": 0.5, "f1": 0.25}).evaluate()
    return [found["eval_f1"], "eval_eval_f1" in found]


def several_datasets(api: Api) -> Any:
    data = {"a": regression_rows(8, seed=1), "b": regression_rows(4, seed=2)}
    found = api.plain_trainer(eval_dataset=data).evaluate()
    return {key: value for key, value in found.items() if key.endswith("loss")}


def given_dataset(api: Api) -> Any:
    return api.evaluated_trainer().evaluate(regression_rows(4, seed=5))["eval_loss"]


def given_datasets(api: Api) -> Any:
    found = api.evaluated_trainer().evaluate({"x": regression_rows(4, seed=5)})
    return {key: value for key, value in found.items() if key.endswith("loss")}


def one_dataset_by_name(api: Api) -> Any:
    data = {"a": regression_rows(8, seed=1), "b": regression_rows(4, seed=2)}
    return api.plain_trainer(eval_dataset=data).evaluate(eval_dataset="b")["eval_loss"]


def inputs_of_compute_metrics(api: Api) -> Any:
    seen: list[Any] = []

    def metrics(prediction: Any) -> Any:
        predictions, labels = prediction
        seen.append([type(predictions).__name__, list(predictions.shape), str(predictions.dtype)])
        seen.append([type(labels).__name__, list(labels.shape), str(labels.dtype)])
        seen.append([prediction.inputs, prediction.losses, prediction.predictions is predictions])
        return {}

    _classifier(api, compute_metrics=metrics).evaluate()
    return seen


def inputs_and_losses_on_request(api: Api) -> Any:
    seen: list[Any] = []

    def metrics(prediction: Any) -> Any:
        seen.append([list(prediction.inputs.shape), list(prediction.losses.shape), prediction.losses.mean()])
        return {}

    _classifier(api, {"include_for_metrics": ["inputs", "loss"]}, compute_metrics=metrics).evaluate()
    return seen


def logits_can_be_reduced(api: Api) -> Any:
    seen: list[Any] = []

    def metrics(prediction: Any) -> Any:
        seen.append([list(prediction.predictions.shape), str(prediction.predictions.dtype)])
        return {"accuracy": (prediction.predictions == prediction.label_ids).mean()}

    def reduce(logits: Any, labels: Any) -> Any:
        return logits.argmax(dim=-1)

    found = _classifier(api, compute_metrics=metrics, preprocess_logits_for_metrics=reduce).evaluate()
    return [seen, found["eval_accuracy"]]


def numpy_metrics_become_numbers(api: Api) -> Any:
    found = _classifier(api, compute_metrics=lambda p: {"a": np.float32(0.5), "b": torch.tensor(2.0)}).evaluate()
    return [type(found["eval_a"]).__name__, type(found["eval_b"]).__name__]


def metrics_batch_by_batch(api: Api) -> Any:
    seen: list[Any] = []

    def metrics(prediction: Any, compute_result: bool = False) -> Any:
        seen.append([len(prediction.label_ids), compute_result])
        return {"samples": sum(count for count, _ in seen)} if compute_result else {}

    found = _classifier(api, {"batch_eval_metrics": True}, compute_metrics=metrics).evaluate()
    return [seen, found["eval_samples"]]


def prediction_loss_only(api: Api) -> Any:
    found = _classifier(api, {"prediction_loss_only": True}).evaluate()
    return ["eval_accuracy" in found, "eval_loss" in found]


def accumulation_of_predictions(api: Api) -> Any:
    return _classifier(api, {"eval_accumulation_steps": 1}).evaluate()["eval_accuracy"]


def predictions_in_a_list(api: Api) -> Any:
    seen: list[Any] = []

    def metrics(prediction: Any) -> Any:
        seen.append([type(prediction.predictions).__name__, [len(part) for part in prediction.predictions]])
        return {}

    _classifier(api, {"eval_do_concat_batches": False}, compute_metrics=metrics).evaluate()
    return seen


def the_model_is_in_training_mode_again(api: Api) -> Any:
    modes: list[bool] = []

    class Watching(Regression):
        def forward(self, x: Any, labels: Any) -> Any:
            modes.append(self.training)
            return super().forward(x, labels)

    trainer = api.evaluated_trainer({"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}, model=Watching())
    trainer.train()
    return modes


def the_model_after_evaluate_is_in_evaluation_mode(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    trainer.evaluate()
    return trainer.model.training


def evaluate_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            found = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            found["eval_mine"] = 1.0
            return found

    trainer = api.evaluated_trainer(
        {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "mine", "save_strategy": "best"},
        base=lambda base: Mine,
    )
    trainer.train()
    return [trainer.state.best_metric, trainer.state.best_global_step]


def evaluation_loop_can_be_called(api: Api) -> Any:
    trainer = _classifier(api)
    loader = trainer.get_eval_dataloader()
    output = trainer.evaluation_loop(loader, description="Mine", prediction_loss_only=None, metric_key_prefix="m")
    return [output._fields, output.num_samples, list(output.predictions.shape), sorted(output.metrics)[:1]]


def prediction_step_can_be_called(api: Api) -> Any:
    trainer = _classifier(api)
    batch = next(iter(trainer.get_eval_dataloader()))
    loss, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    return [loss, list(logits.shape), labels]


def keys_to_ignore(api: Api) -> Any:
    class Two(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            loss, prediction = super().forward(x, labels)
            return {"loss": loss, "prediction": prediction, "hidden": prediction * 2}

    trainer = api.evaluated_trainer(model=Two())
    both = trainer.predict(trainer.eval_dataset).predictions
    one = trainer.predict(trainer.eval_dataset, ignore_keys=["hidden"]).predictions
    return [len(both), one.shape[0], type(both).__name__]


def a_metric_per_label(api: Api) -> Any:
    found = _classifier(api, compute_metrics=lambda p: {"per_class": {"a": 1.0}, "list": [1, 2]}).evaluate()
    return [found["eval_per_class"], found["eval_list"]]


def a_model_that_gives_a_loss_without_labels(api: Api) -> Any:
    class Own(Regression):
        def forward(self, x: Any, return_loss: bool = True) -> Any:
            prediction = self.layers(x).squeeze(-1)
            return {"loss": (prediction**2).mean(), "prediction": prediction}

    rows = [{"x": row["x"]} for row in regression_rows(8)]
    return api.plain_trainer(model=Own(), train_dataset=rows, eval_dataset=rows).evaluate()["eval_loss"]

"""EarlyStoppingCallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.behaviors.api import Api, raised

_CHANGES = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "max_steps": 8,
    "save_total_limit": 1,
}


def _run(api: Api, values: Sequence[float], patience: int = 1, threshold: float = 0.0, **changes: Any) -> Any:
    series = iter(values)
    trainer = api.evaluated_trainer(
        {**_CHANGES, **changes},
        callbacks=[api.EarlyStoppingCallback(patience, threshold)],
        compute_metrics=lambda prediction: {"accuracy": next(series)},
    )
    return [trainer.train().global_step, trainer.state.best_metric, trainer.state.best_global_step]


def patience_of_one(api: Api) -> Any:
    return _run(api, [0.1, 0.2, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7])


def patience_of_two(api: Api) -> Any:
    return _run(api, [0.1, 0.2, 0.15, 0.16, 0.4, 0.5, 0.6, 0.7], patience=2)


def threshold(api: Api) -> Any:
    return _run(api, [0.1, 0.3, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9], threshold=0.1)


def smaller_is_better(api: Api) -> Any:
    return _run(api, [0.5, 0.4, 0.45, 0.3, 0.2, 0.1, 0.05, 0.01], greater_is_better=False)


def never_stopped(api: Api) -> Any:
    return _run(api, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])


def without_a_metric(api: Api) -> Any:
    def train() -> None:
        api.evaluated_trainer({"eval_strategy": "steps"}, callbacks=[api.EarlyStoppingCallback()]).train()

    return raised(train)


def without_evaluations(api: Api) -> Any:
    def train() -> None:
        changes = {"metric_for_best_model": "loss"}
        api.evaluated_trainer(changes, callbacks=[api.EarlyStoppingCallback()]).train()

    return raised(train)


def state_of_the_callback(api: Api) -> Any:
    callback = api.EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.5)
    callback.early_stopping_patience_counter = 2
    again = type(callback).from_state(callback.state())
    return [callback.state(), again.early_stopping_patience, again.early_stopping_patience_counter]


def by_the_loss_of_the_model(api: Api) -> Any:
    changes = {**_CHANGES, "metric_for_best_model": "loss", "learning_rate": 0.0}
    trainer = api.evaluated_trainer(changes, callbacks=[api.EarlyStoppingCallback(2)])
    return [trainer.train().global_step, trainer.state.best_global_step]

"""hyperparameter_search with optuna."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api
from tests.support.models import Regression


def _trainer(api: Api, changes: Any = None, **given: Any) -> Any:
    return api.evaluated_trainer(
        {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **(changes or {})}, model_init=Regression, **given
    )


def _space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", [0.01])}


def best_run(api: Api) -> Any:
    found = _trainer(api).hyperparameter_search(hp_space=_space, n_trials=2, backend="optuna")
    return [found._fields, found.run_id, found.objective, found.hyperparameters]


def objective_of_the_user(api: Api) -> Any:
    found = _trainer(api).hyperparameter_search(
        hp_space=_space,
        n_trials=1,
        backend="optuna",
        compute_objective=lambda metrics: metrics["eval_loss"] * 2,
        direction="maximize",
    )
    return found.objective


def default_objective(api: Api) -> Any:
    from transformers.trainer_utils import default_compute_objective

    metrics = {"eval_loss": 1.0, "eval_runtime": 2.0, "epoch": 1.0, "eval_samples_per_second": 3.0}
    own = api.default_compute_objective if api.is_ours else default_compute_objective
    return [own(metrics), own({**metrics, "eval_accuracy": 0.5, "eval_f1": 0.25})]


def names_of_trials(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([state.is_hyper_param_search, state.trial_name, state.trial_params])

    trainer = _trainer(api, callbacks=[Mine])
    trainer.hyperparameter_search(
        hp_space=_space, n_trials=2, backend="optuna", hp_name=lambda trial: f"mine-{trial.number}"
    )
    return seen


def directories_of_trials(api: Api) -> Any:
    trainer = _trainer(api, {"save_strategy": "steps", "save_steps": 2})
    trainer.hyperparameter_search(hp_space=_space, n_trials=2, backend="optuna")
    return [name for name in api.files() if name.startswith("run-")], "checkpoint-2" in api.files("run-0")


def model_init_with_the_trial(api: Api) -> Any:
    seen: list[bool] = []

    def build(trial: Any) -> Any:
        seen.append(trial is None)
        return Regression()

    changes = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = api.evaluated_trainer(changes, model_init=build)
    trainer.hyperparameter_search(hp_space=_space, n_trials=1, backend="optuna")
    return [seen[0], False in seen]


def arguments_of_a_trial(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([args.learning_rate, args.per_device_train_batch_size, state.max_steps])

    def space(trial: Any) -> Any:
        return {"learning_rate": 0.5, "per_device_train_batch_size": 2, "max_steps": 3}

    _trainer(api, callbacks=[Mine]).hyperparameter_search(hp_space=space, n_trials=1, backend="optuna")
    return seen


def training_after_the_search(api: Api) -> Any:
    trainer = _trainer(api)
    best = trainer.hyperparameter_search(hp_space=_space, n_trials=1, backend="optuna")
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    return [trainer.state.global_step, trainer.state.log_history[0]["learning_rate"]]


def several_objectives(api: Api) -> Any:
    found = _trainer(api).hyperparameter_search(
        hp_space=_space,
        n_trials=1,
        backend="optuna",
        direction=["minimize", "maximize"],
        compute_objective=lambda metrics: [metrics["eval_loss"], 1.0],
    )
    return [type(found).__name__, len(found), found[0].objective]

"""The parts of a search that need no training: default spaces, objectives, a trial's values in the arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest

from ds_trainer import (
    ConfigError,
    HPSearchBackend,
    TrainingArguments,
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_wandb,
)
from ds_trainer.training.search.backend import find_backend, register_backend
from ds_trainer.training.search.objective import checked_objective
from ds_trainer.training.search.trial import SearchError, SearchTrial, as_trial
from ds_trainer.training.search.trial_runner import arguments_of

SPEED = {"eval_runtime": 2.0, "eval_samples_per_second": 50.0, "eval_steps_per_second": 5.0, "epoch": 3.0}
OWN_METRICS = {
    "eval_items": 400,
    "eval_model_preparation_time": 0.1,
    "eval_mem_cpu_alloc_delta": 7,
    "before_init_mem_cpu": 9,
}


@pytest.mark.parametrize(
    ("metrics", "objective"),
    [
        ({"eval_loss": 0.7, **SPEED, **OWN_METRICS}, 0.7),
        ({"eval_loss": 0.7, "eval_accuracy": 0.5, "eval_f1": 0.25, **SPEED, **OWN_METRICS}, 0.75),
        ({"eval_accuracy": np.float64(0.5)}, 0.5),
        ({"eval_accuracy": 0.5, "eval_matrix": [[1, 2], [3, 4]], "eval_done": True}, 0.5),
        ({"eval_hinge_loss": 0.3, "eval_loss": 0.7, **SPEED}, 0.3),
        # Two evaluation sets: the sum of their losses, or of their metrics.
        (
            {"eval_a_loss": 1.0, "eval_a_runtime": 1.0, "eval_b_loss": 2.0, "eval_b_runtime": 1.0, "eval_b_items": 4},
            3.0,
        ),
        ({"eval_a_loss": 1.0, "eval_a_runtime": 1.0, "eval_a_f1": 0.5, "eval_b_f1": 0.25, "eval_b_runtime": 1.0}, 0.75),
    ],
)
def test_default_objective(metrics: dict[str, Any], objective: float) -> None:
    before = dict(metrics)
    assert default_compute_objective(metrics) == objective
    assert metrics == before


def test_default_objective_is_that_of_the_reference() -> None:
    transformers = pytest.importorskip("transformers.trainer_utils")
    for metrics in ({"eval_loss": 0.7, **SPEED}, {"eval_loss": 0.7, "eval_accuracy": 0.5, "eval_f1": 0.25, **SPEED}):
        assert default_compute_objective(metrics) == transformers.default_compute_objective(metrics)


def test_an_evaluation_without_metrics_is_no_objective() -> None:
    with pytest.raises(SearchError, match=r"neither a loss nor a metric \(eval_runtime"):
        default_compute_objective(SPEED)


def test_number_of_objectives() -> None:
    assert checked_objective(np.float32(2.0), None) == 2.0
    assert checked_objective((1, 2.5), 2) == [1.0, 2.5]
    assert checked_objective([3], 1) == [3.0]
    for wrong, directions in (((1.0, 2.0), None), (1.0, 2), ("0.5", None), (None, None)):
        with pytest.raises(SearchError, match="compute_objective returned"):
            checked_objective(wrong, directions)


def test_default_spaces_are_those_of_the_reference() -> None:
    reference = pytest.importorskip("transformers.trainer_utils")

    def drawn(space: Any) -> dict[str, Any]:
        study = optuna.create_study()
        trial = study.ask()
        assert space(trial) == trial.params
        return dict(trial.distributions)

    assert drawn(default_hp_space_optuna) == drawn(reference.default_hp_space_optuna)
    expected = reference.default_hp_space_wandb(None)["parameters"]
    ours = default_hp_space_wandb()["parameters"]
    assert ours.keys() == expected.keys()
    assert {name: ours[name] for name in ours if name != "learning_rate"} == {
        name: expected[name] for name in expected if name != "learning_rate"
    }


# -- values in arguments -----------------------------------------------------------------------------------------------


def trial(**values: Any) -> SearchTrial:
    return SearchTrial(values, None, values, "3", "run-3")


def test_trial_values_are_validated() -> None:
    args = TrainingArguments("out", run_name="mine", learning_rate=1e-3, logging_steps=10, eval_strategy="steps")
    before = dict(vars(args))
    made = arguments_of(
        trial(learning_rate=np.float64(0.5), seed=7.0, optim="sgd", logging_steps=20, deepspeed={"steps_per_print": 3}),
        args,
    )
    assert (made.learning_rate, made.seed, str(made.optim), made.logging_steps) == (0.5, 7, "sgd", 20)
    assert type(made.learning_rate) is float and type(made.seed) is int
    assert made.eval_steps == 20  # follows, as in arguments that were made with these values
    assert made.deepspeed == {"steps_per_print": 3}
    assert (made.output_dir, made.run_name) == ("out/run-3", "mine")
    assert made.where("learning_rate") == "trial 3"
    assert dict(vars(args)) == before


def test_derived_defaults_do_not_override_given_values() -> None:
    args = TrainingArguments("out", logging_steps=10, eval_strategy="steps", eval_steps=5)
    assert arguments_of(trial(logging_steps=20), args).eval_steps == 5


def test_wrong_names_and_values_of_a_trial_are_rejected() -> None:
    args = TrainingArguments("out")
    with pytest.raises(SearchError, match=r"'learning_rat' is not an argument .* Did you mean 'learning_rate'"):
        arguments_of(trial(learning_rat=1e-3), args)
    with pytest.raises(ConfigError, match=r"seed=1.5.*expected int.*\(trial 3: seed=1.5\)") as error:
        arguments_of(trial(seed=1.5), args)
    assert not isinstance(error.value, SearchError)  # another trial may do better
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size=0.*trial 3"):
        arguments_of(trial(per_device_train_batch_size=0), args)


def test_train_accepts_every_kind_of_trial() -> None:
    fixed = optuna.trial.FixedTrial({"learning_rate": 0.5, "width": 8})
    fixed.suggest_float("learning_rate", 0, 1), fixed.suggest_int("width", 1, 9)
    assert as_trial(fixed, {"learning_rate"}, model_takes_trial=True).values == {"learning_rate": 0.5}
    assert as_trial(fixed, {"learning_rate"}, model_takes_trial=False).values == {"learning_rate": 0.5, "width": 8}
    assert as_trial({"seed": 1}, set(), model_takes_trial=False).values == {"seed": 1}
    with pytest.raises(ConfigError, match="trial=7 is a int"):
        as_trial(7, set(), model_takes_trial=False)


# -- backends ----------------------------------------------------------------------------------------------------------


class Lottery:
    name = "lottery"
    install = "lottery"

    def __init__(self, available: bool) -> None:
        self.available = available

    def is_available(self) -> bool:
        return self.available

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        return {}

    def run(self, trainer: Any, n_trials: Any, direction: Any, **kwargs: Any) -> Any:
        return trainer, n_trials, direction, kwargs


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_trainer.training.search.backend._backends", {})
    assert find_backend(None).name == "optuna" == find_backend(HPSearchBackend.OPTUNA).name
    with pytest.raises(ConfigError, match=r"'optun' is unknown. Did you mean 'optuna'.*Installed: optuna"):
        find_backend("optun")
    register_backend(Lottery(available=False))
    with pytest.raises(ConfigError, match=r"'lottery' is not installed: `pip install lottery`. Installed: optuna"):
        find_backend("lottery")
    chosen = Lottery(available=True)
    register_backend(chosen)
    assert find_backend("lottery") is chosen

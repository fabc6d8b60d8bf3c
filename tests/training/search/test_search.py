"""A search in one process: what is refused, several directions, names and directories, resuming, failing, trackers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import optuna
import pytest
from torch import nn

from ds_trainer import BestRun, ConfigError, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.search.optuna_backend import PROCESS
from tests.support.models import Regression, regression_rows
from tests.training.search.test_search_ranks import arguments, make_trainer


@pytest.fixture
def one_step(tmp_path: Path) -> TrainingArguments:
    return arguments(str(tmp_path), max_steps=1, eval_strategy="no")


def rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.01, 0.1)}


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "hyperopt"}, "'hyperopt' is unknown.*Installed: optuna"),
        ({"n_trials": 0}, "n_trials=0 must be at least 1"),
        ({"n_trials": None}, "n_trials=None sets no limit"),
        ({"direction": "up"}, "direction='up': use 'minimize' or 'maximize'"),
        ({"n_jobs": 2}, "n_jobs=2: a process has one engine"),
        ({"storge": "sqlite:///x"}, "storge='sqlite:///x'.*Did you mean 'storage'"),
        ({"directions": ["minimize"]}, r"pass it as direction=\["),
        (
            {"direction": ["minimize", "maximize"], "pruner": optuna.pruners.NopPruner()},
            "pruner=NopPruner .* single-objective studies only",
        ),
        ({"hp_space": lambda trial: {"learning_rte": 1.0}}, "'learning_rte' is not an argument of TrainingArguments"),
        ({"compute_objective": lambda metrics: [1.0, 2.0]}, "but the search needs one number"),
        ({"direction": ["minimize"] * 2}, "but the search needs 2 numbers, one for each direction"),
    ],
)
def test_wrong_search_options_are_rejected(one_step: TrainingArguments, options: dict[str, Any], message: str) -> None:
    trials: list[int] = []

    def space(trial: Any) -> dict[str, Any]:
        trials.append(trial.number)
        return rate(trial)

    trainer = make_trainer(one_step)
    with pytest.raises(ConfigError, match=message):
        trainer.hyperparameter_search(**{"hp_space": space, "n_trials": 3, "backend": "optuna", **options})
    assert len(trials) <= 1  # no second trial makes the same mistake
    assert trainer.args is one_step and trainer.hp_search_backend is None


def test_a_search_needs_model_init(one_step: TrainingArguments) -> None:
    trainer = Trainer(Regression(), one_step, train_dataset=regression_rows(8))
    with pytest.raises(ConfigError, match="pass model_init"):
        trainer.hyperparameter_search(rate, n_trials=1)
    with pytest.raises(ConfigError, match="needs a model_init"):
        trainer.train(trial={"learning_rate": 1.0})


def test_a_search_without_an_objective_is_rejected_before_the_first_trial(one_step: TrainingArguments) -> None:
    trainer = make_trainer(one_step)
    trainer.eval_dataset = None
    with pytest.raises(ConfigError, match="pass an eval_dataset"):
        trainer.hyperparameter_search(lambda trial: pytest.fail("a trial has begun"), n_trials=1)


def test_a_search_with_a_given_optimizer_is_rejected(one_step: TrainingArguments) -> None:
    with pytest.raises(ConfigError, match="model_init creates a new model"):
        make_trainer(one_step, optimizers=(object(), None))


def test_a_study_of_another_direction_is_rejected(one_step: TrainingArguments, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(storage=storage, study_name="s", direction="maximize")
    with pytest.raises(ConfigError, match="has direction maximize, not direction=minimize"):
        make_trainer(one_step).hyperparameter_search(
            rate, n_trials=1, storage=storage, study_name="s", load_if_exists=True
        )


# -- what a search does ------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_several_directions_and_no_evaluation_while_training(one_step: TrainingArguments) -> None:
    """The objective of each trial comes from an evaluation at its end; the best are those that none beats in both."""

    def both(metrics: dict[str, Any]) -> tuple[float, float]:
        return metrics["eval_loss"], -metrics["eval_loss"]

    best = make_trainer(one_step).hyperparameter_search(
        rate, both, n_trials=2, direction=["minimize", "minimize"], sampler=optuna.samplers.RandomSampler(seed=0)
    )
    assert isinstance(best, list) and {run.run_id for run in best} == {"0", "1"}
    for run in best:
        assert isinstance(run, BestRun) and run.objective[0] == -run.objective[1] > 0  # type: ignore[index]


@pytest.mark.extended
def test_trials_have_their_own_names_directories_and_checkpoints(tmp_path: Path) -> None:
    """Every trial has a directory of its own; checkpoints, records and TensorBoard's files are inside it, and
    callbacks start again."""
    patience: list[int] = []

    class Probe(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            patience.append(stopping.early_stopping_patience_counter)
            assert state.is_hyper_param_search == (len(patience) <= 2)
            assert state.trial_params == ({"learning_rate": args.learning_rate} if len(patience) <= 2 else None)

    stopping = EarlyStoppingCallback(1)
    args = arguments(
        str(tmp_path), max_steps=3, save_strategy="best", load_best_model_at_end=True, report_to="tensorboard"
    )
    trainer = make_trainer(args, callbacks=[stopping, Probe()])

    def space(trial: Any) -> dict[str, Any]:  # backwards: no evaluation is better than the first
        return {"learning_rate": trial.suggest_categorical("learning_rate", [100.0])}

    best = trainer.hyperparameter_search(space, n_trials=2, hp_name=lambda trial: f"number {trial.number}")
    assert best.run_id == "0"  # type: ignore[union-attr]
    for number in range(2):
        directory = tmp_path / f"number {number}"
        state = json.loads((directory / "trainer_state.json").read_text())
        assert state["trial_name"] == f"number {number}" and state["trial_params"] == {"learning_rate": 100.0}
        assert state["best_model_checkpoint"] == str(directory / "checkpoint-1")
        assert (directory / "checkpoint-1").is_dir() and (directory / "metrics.jsonl").is_file()
        assert len(list(directory.glob("runs/*/*/events*"))) == 1
    trainer.train()
    assert patience == [0, 0, 0]  # two trials that stopped for lack of patience, and a training of our own
    assert len(list(tmp_path.glob("runs/*/events*"))) == 1
    assert not trainer.state.is_hyper_param_search
    trainer.engine.close()


def test_a_trial_that_fails_is_recorded_and_all_of_them_are_an_error(
    one_step: TrainingArguments, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    options: dict[str, Any] = {"storage": storage, "study_name": "s", "load_if_exists": True}

    def space(trial: Any) -> dict[str, Any]:
        # The first value cannot work: a micro-batch is refused by the arguments' own checks.
        return {"per_device_train_batch_size": trial.suggest_int("per_device_train_batch_size", -2, -1)}

    with pytest.raises(RuntimeError, match=r"None of 2 trials completed: 2 failed.*per_device_train_batch_size=-"):
        make_trainer(one_step).hyperparameter_search(space, n_trials=2, **options)
    # Going on with the study: its failed trials stay, this call's trials come on top.
    best = make_trainer(one_step).hyperparameter_search(rate, n_trials=1, **options)
    assert best.run_id == "2"  # type: ignore[union-attr]
    assert states(optuna.load_study(study_name="s", storage=storage)) == ["FAIL", "FAIL", "COMPLETE"]
    with pytest.raises(ConfigError, match="per_device_train_batch_size=-"):  # as optuna does where it is told to
        make_trainer(one_step).hyperparameter_search(space, n_trials=2, catch=(), **options)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_study_resumes(kind: str, one_step: TrainingArguments, tmp_path: Path) -> None:
    """A second search continues where the first one was killed: the trial that was left running counts as failed."""
    storage: Any = f"sqlite:///{tmp_path}/study.db"
    if kind == "journal":
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
        storage = optuna.storages.JournalStorage(backend)
    options: dict[str, Any] = {"storage": storage, "study_name": "s", "load_if_exists": True, "backend": "optuna"}
    make_trainer(one_step).hyperparameter_search(rate, n_trials=1, **options)
    study = optuna.load_study(study_name="s", storage=storage)
    dead, elsewhere, alive = study.ask(), study.ask(), study.ask()
    first_process = study.trials[0].user_attrs[PROCESS]
    assert first_process["pid"] == os.getpid()
    dead.set_user_attr(
        PROCESS, {**first_process, "began": first_process["began"] - 60.0}
    )  # the same number, an earlier process
    elsewhere.set_user_attr(PROCESS, {**first_process, "host": "another machine"})
    alive.set_user_attr(PROCESS, first_process)
    best = make_trainer(one_step).hyperparameter_search(rate, n_trials=1, **options)
    study = optuna.load_study(study_name="s", storage=storage)
    assert states(study) == ["COMPLETE", "FAIL", "RUNNING", "RUNNING", "COMPLETE"]
    assert best.objective == min(study.trials[0].value, study.trials[4].value)  # type: ignore[union-attr]
    assert (tmp_path / "run-4").is_dir()


# -- train(trial=...) --------------------------------------------------------------------------------------------------


def test_train_with_hyperparameters(tmp_path: Path) -> None:
    seen: list[Any] = []

    def make(trial: Any = None) -> nn.Module:
        seen.append(trial)
        return Regression()

    args = arguments(str(tmp_path), max_steps=2)
    trainer = Trainer(model_init=make, args=args, train_dataset=regression_rows(16), eval_dataset=regression_rows(4))
    values = {"learning_rate": 0.07, "max_steps": 1, "per_device_train_batch_size": 2}
    assert trainer.train(trial=values).global_step == 1
    assert seen[-1] is values
    assert (trainer.args.learning_rate, trainer.get_total_train_batch_size(trainer.args)) == (0.07, 2)
    assert trainer.state.is_hyper_param_search and trainer.state.trial_params == values
    assert args.max_steps == 2
    trial = optuna.trial.FixedTrial({"max_steps": 3, "width": 4})
    trial.suggest_int("max_steps", 1, 3), trial.suggest_int("width", 1, 9)
    assert trainer.train(trial=trial).global_step == 3
    assert seen[-1] is trial and trainer.get_total_train_batch_size(trainer.args) == 8
    assert trainer.train().global_step == 2
    assert seen[-1] is None and trainer.args is args and not trainer.state.is_hyper_param_search
    trainer.engine.close()


def test_arguments_changed_after_construction_are_validated_again(tmp_path: Path) -> None:
    trainer = make_trainer(arguments(str(tmp_path), max_steps=1))
    trainer.args.per_device_train_batch_size, trainer.args.learning_rate = 2, 0.03
    trainer.train()
    assert trainer._ds_trainer.compiled.get("train_micro_batch_size_per_gpu") == 2
    assert (
        trainer._ds_trainer.compiled.get("optimizer.params.lr", trainer.optimizer.param_groups[0]["initial_lr"]) == 0.03
    )
    trainer.args.per_device_train_batch_size = -1
    with pytest.raises(ConfigError, match="per_device_train_batch_size=-1"):
        trainer.train()
    trainer.engine.close()

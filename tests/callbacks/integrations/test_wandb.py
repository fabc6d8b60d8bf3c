"""Weights & Biases, offline: what the run's own file says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.callbacks.integrations.wandb import WandbCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from tests.callbacks.integrations.support import (
    TOKEN,
    TrainingResult,
    TransformersCallback,
    files_below,
    files_with,
    train,
)
from tests.callbacks.integrations.wandb_file import OfflineRun, offline_runs
from tests.support.pool import pool


def finish_wandb(trainer: Trainer | None = None) -> None:
    """Ends the run and wandb's service, which forgets its settings: what the end of a process does."""
    import wandb

    wandb.finish()
    wandb.teardown()


def tracked(
    directory: Path, arguments: dict[str, Any], environment: dict[str, str] | None = None, **more: Any
) -> tuple[TrainingResult, list[OfflineRun]]:
    """A training with wandb in ``directory``, and the runs that it left."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(directory), "WANDB_SILENT": "true", **(environment or {})}
    job = partial(train, directory / "out", settings, arguments, after=finish_wandb, **more)
    (result,) = pool(1).run(job)
    return result, offline_runs(directory)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult, OfflineRun]:
    directory = tmp_path_factory.mktemp("wandb")
    arguments = {"report_to": "wandb", "run_name": "third try", "deepspeed": {"comet": {"api_key": TOKEN}}}
    result, (found,) = tracked(directory, arguments, llama=True)
    assert result.warnings == []
    return directory, result, found


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("curve", "name"),
    [("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("eval/loss", "eval_loss"), ("test/loss", "test_loss")],
)
def test_values_are_those_of_the_history(run: tuple[Path, TrainingResult, OfflineRun], curve: str, name: str) -> None:
    """``test/loss`` was logged after the training."""
    _, result, found = run
    assert found.values(curve) == result.values(name) != []


def test_the_axis_and_the_summary(run: tuple[Path, TrainingResult, OfflineRun]) -> None:
    _, result, found = run
    assert found.axes["*"] == "train/global_step"
    (train_loss,) = result.values("train_loss")
    assert found.summary["train_loss"] == train_loss[1]
    assert "train/train_loss" not in found.names()


def test_arguments_are_recorded_without_secrets(run: tuple[Path, TrainingResult, OfflineRun]) -> None:
    directory, _, found = run
    assert (found.project, found.name) == ("huggingface", "third try")
    assert found.config["learning_rate"] == 1e-2 and found.config["hidden_size"] == 32
    assert found.config["hub_token"] == "<HUB_TOKEN>"
    assert found.config["ds_config"]["optimizer"]["params"]["lr"] == 1e-2
    assert found.config["ds_config"]["comet"]["api_key"] == "<API_KEY>"
    assert found.config["model/num_parameters"] == 19424
    assert files_with(TOKEN, directory / "wandb") == []
    assert files_with("learning_rate", directory / "wandb") != []


def test_names_are_those_of_transformers(run: tuple[Path, TrainingResult, OfflineRun], tmp_path: Path) -> None:
    _, _, ours = run
    _, (reference,) = tracked(
        tmp_path, {"run_name": "third try"}, llama=True, callbacks=(TransformersCallback("WandbCallback"),)
    )
    assert ours.names() == reference.names()
    assert set(ours.config) == {*reference.config, "ds_config"}
    assert ours.axes == reference.axes
    assert (ours.project, ours.name) == (reference.project, reference.name)
    assert ours.values("train/loss") == reference.values("train/loss")


def test_environment_and_project(tmp_path: Path) -> None:
    watched = {"WANDB_WATCH": "gradients", "WANDB_LOG_MODEL": "checkpoint"}
    arguments: dict[str, Any] = {"report_to": "wandb", "project": "mine"}
    arguments.update({"save_strategy": "steps", "save_steps": 100, "max_steps": 101})
    arguments.update(logging_steps=50, eval_steps=50)
    result, (found,) = tracked(tmp_path / "a", arguments, watched)
    assert result.warnings == [] and found.project == "mine"
    assert any(name.startswith("gradients/layers.0.weight") for name in found.names())
    assert [sorted(artifact["aliases"])[0] for artifact in found.artifacts] == [
        "checkpoint_global_step_100",
        "checkpoint_global_step_101",
    ]
    for artifact, step in zip(found.artifacts, (100, 101), strict=True):  # whole, though saved in the background
        assert artifact["files"] == files_below(tmp_path / "a" / "out" / f"checkpoint-{step}")
    arguments.update(max_steps=2, save_steps=1)
    _, (found,) = tracked(tmp_path / "b", arguments, {"WANDB_PROJECT": "theirs", "WANDB_LOG_MODEL": "end"})
    assert found.project == "theirs" and not any(name.startswith("gradients/") for name in found.names())
    (artifact,) = found.artifacts
    assert "final_model" in artifact["aliases"]


class EndRun(TrainerCallback):
    """Ends the run in the middle of the training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            import wandb

            wandb.finish()


def test_an_outage_causes_a_warning_but_the_run_continues(tmp_path: Path) -> None:
    result, (found,) = tracked(tmp_path, {"report_to": "wandb"}, callbacks=(EndRun,))
    assert result.steps == 3 and len(result.values("loss")) == 3 and result.values("test_loss")
    (warning,) = result.warnings
    assert "wandb failed and is disabled" in warning and "finished elsewhere" in warning
    assert found.values("train/loss") == []


def two_trials(directory: Path) -> None:
    import os

    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(directory), WANDB_SILENT="true")
    ours, args = WandbCallback(), TrainingArguments(str(directory / "out"), run_name="search")
    for name in ("first", "second"):
        state = TrainerState(is_hyper_param_search=True, trial_name=name)
        ours.on_train_begin(args, state, TrainerControl())
        ours.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
        ours.on_train_end(args, state, TrainerControl())
    finish_wandb()


def test_each_trial_is_a_run_of_one_group(tmp_path: Path) -> None:
    pool(1).run(two_trials, tmp_path)
    assert [(run.name, run.group) for run in offline_runs(tmp_path)] == [("first", "search"), ("second", "search")]

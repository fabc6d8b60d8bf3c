"""MLflow with a store of its own on disk: what its client says afterwards."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.callbacks.integrations.mlflow import MLflowCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from tests.callbacks.integrations.support import TOKEN, TrainingResult, TransformersCallback, files_below, train
from tests.support.pool import pool

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")

# A database takes MLflow seconds to set up; its plain files do for the smaller tests.
FILES = {"MLFLOW_ALLOW_FILE_STORE": "true"}


class Store:
    """One store, seen through MLflow's client."""

    def __init__(self, uri: str) -> None:
        os.environ.update(FILES)
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)

    def runs(self, experiment: str = "Default") -> list[Any]:
        """The runs of an experiment, oldest first."""
        found = self.client.get_experiment_by_name(experiment)
        return self.client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]) if found else []

    def values(self, run: Any, name: str) -> list[tuple[int, float]]:
        """Step and value of every point of a metric."""
        history = self.client.get_metric_history(run.info.run_id, name)
        return [(point.step, point.value) for point in sorted(history, key=lambda point: point.step)]


def forget_store(trainer: Trainer | None = None) -> None:
    """What the end of a process does: MLflow keeps the experiment in a global and in the environment."""
    import mlflow

    while mlflow.active_run():
        with suppress(mlflow.MlflowException):  # of a store that a test has broken
            mlflow.end_run()
    mlflow.tracking.fluent._active_experiment_id = None
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)


def tracked(
    directory: Path, arguments: dict[str, Any], environment: dict[str, str] | None = None, **more: Any
) -> tuple[TrainingResult, Store]:
    """A training with MLflow in ``directory``."""
    uri = f"file://{directory}/store"
    settings = {"MLFLOW_TRACKING_URI": uri, **FILES, **(environment or {})}
    (result,) = pool(1).run(partial(train, directory / "out", settings, arguments, after=forget_store, **more))
    return result, Store(settings["MLFLOW_TRACKING_URI"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult, Store]:
    directory = tmp_path_factory.mktemp("mlflow")
    arguments = {"report_to": "mlflow", "run_name": "third try", "deepspeed": {"comet": {"api_key": TOKEN}}}
    database = {"MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db"}
    result, store = tracked(directory, arguments, database, llama=True)
    assert result.warnings == []
    return directory, result, store


@pytest.mark.parametrize("name", ["loss", "grad_norm", "eval_loss", "train_loss", "test_loss"])
def test_values_are_those_of_the_history(run: tuple[Path, TrainingResult, Store], name: str) -> None:
    """In one run, also what was logged after the training (``test_loss``)."""
    _, result, store = run
    (found,) = store.runs()
    assert store.values(found, name) == result.values(name) != []
    assert found.info.status == "FINISHED" and found.info.run_name == "third try"


def test_arguments_are_recorded_without_secrets(run: tuple[Path, TrainingResult, Store]) -> None:
    directory, _, store = run
    (found,) = store.runs()
    values = found.data.params
    assert values["learning_rate"] == "0.01" and values["hidden_size"] == "32"
    assert values["hub_token"] == "<HUB_TOKEN>"
    assert values["ds_config.optimizer.params.lr"] == "0.01"
    assert values["ds_config.comet.api_key"] == "<API_KEY>"
    assert TOKEN.encode() not in (directory / "mlflow.db").read_bytes()
    assert b"<HUB_TOKEN>" in (directory / "mlflow.db").read_bytes()


def test_names_are_those_of_transformers(run: tuple[Path, TrainingResult, Store], tmp_path: Path) -> None:
    _, _, store = run
    (ours,) = store.runs()
    result, other = tracked(
        tmp_path, {"run_name": "third try"}, llama=True, callbacks=(TransformersCallback("MLflowCallback"),)
    )
    reference = other.runs()[0]
    after = {
        name for name in ours.data.metrics if name.startswith("test_")
    }  # the callback of transformers opens another run for these
    assert set(ours.data.metrics) - after == set(reference.data.metrics)
    added = {name for name in ours.data.params if name.startswith("ds_config.")}
    assert set(ours.data.params) - added == set(reference.data.params)
    assert other.values(reference, "loss") == store.values(ours, "loss") == result.values("loss")


def test_experiment_tags_and_limits(tmp_path: Path) -> None:
    environment = {
        "MLFLOW_EXPERIMENT_NAME": "trials",
        "MLFLOW_TAGS": '{"team": "vision"}',
        "MLFLOW_MAX_LOG_PARAMS": "5",
    }
    _, store = tracked(tmp_path, {"report_to": "mlflow", "project": "not this one"}, environment)
    (found,) = store.runs("trials")
    assert found.data.tags["team"] == "vision" and len(found.data.params) == 5
    assert store.runs("not this one") == []


def test_project_names_the_experiment_and_checkpoints_are_uploaded(tmp_path: Path) -> None:
    arguments = {"report_to": "mlflow", "project": "mine", "save_strategy": "steps", "save_steps": 2}
    _, store = tracked(tmp_path, arguments, {"HF_MLFLOW_LOG_ARTIFACTS": "1"})
    (found,) = store.runs("mine")
    names = [entry.path for entry in store.client.list_artifacts(found.info.run_id)]
    assert names == ["checkpoint-2", "checkpoint-3"]
    for name in names:  # whole, though saved in the background
        uploaded = store.client.download_artifacts(found.info.run_id, name, str(tmp_path))
        assert files_below(Path(uploaded)) == files_below(tmp_path / "out" / name)


class BreakStore(TrainerCallback):
    """Replaces the run's metrics directory by a file after the first step: the next write fails."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            import shutil

            import mlflow

            mlflow.flush_async_logging()
            store = Path(mlflow.get_tracking_uri().removeprefix("file://"))
            for directory in store.glob("*/*/metrics"):
                shutil.rmtree(directory)
                directory.write_text("no directory")


def test_an_outage_causes_a_warning_but_the_run_continues(tmp_path: Path) -> None:
    result, _ = tracked(tmp_path, {"report_to": "mlflow", "max_steps": 6}, callbacks=(BreakStore,))
    assert result.steps == 6 and len(result.values("loss")) == 6 and result.values("test_loss")
    (warning,) = result.warnings
    assert "mlflow failed and is disabled" in warning


def active_run_is_used(directory: Path) -> tuple[str, str, bool]:
    os.environ.update({"MLFLOW_TRACKING_URI": f"file://{directory}/store", **FILES})
    import mlflow

    try:
        active_run = mlflow.start_run()
        ours, args, state = MLflowCallback(), TrainingArguments(str(directory)), TrainerState()
        ours.on_train_begin(args, state, TrainerControl())
        ours.on_log(args, state, TrainerControl(), logs={"loss (sum)": 1.0})
        ours.on_train_end(args, state, TrainerControl())
        return active_run.info.run_id, str(ours.run_id), mlflow.active_run() is not None
    finally:
        forget_store()
        del os.environ["MLFLOW_TRACKING_URI"]


def test_a_run_that_is_active_already_is_used_and_not_ended(tmp_path: Path) -> None:
    ((active_run, used, still_active),) = pool(1).run(active_run_is_used, tmp_path)
    assert active_run == used and still_active
    store = Store(f"file://{tmp_path}/store")
    assert store.values(store.runs()[0], "loss _sum_") == [(0, 1.0)]

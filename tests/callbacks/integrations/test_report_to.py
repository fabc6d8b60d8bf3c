"""``report_to``: which callbacks it stands for, what it refuses and what it does not import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.callbacks.integrations import ROWS, TRACKERS, Guarded, reporting_callbacks
from ds_trainer.callbacks.integrations.hyperparameters import without_secrets
from ds_trainer.callbacks.integrations.tracker import rewrite_logs
from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.utils.errors import ConfigError
from tests.callbacks.integrations.support import TrainingResult, train
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

ABSENT = [row.name for row in ROWS if row.missing]


def names(callbacks: list[Any]) -> list[str]:
    return [callback.name for callback in callbacks]


@pytest.mark.parametrize("nothing", [None, "none", [], ["none"]])
def test_no_tracker_is_used_by_default(nothing: Any) -> None:
    assert reporting_callbacks(nothing) == []


def test_report_to_may_be_one_or_several_and_repeated() -> None:
    assert names(reporting_callbacks("tensorboard")) == ["tensorboard"]
    assert names(reporting_callbacks(["wandb", "tensorboard", "wandb"])) == ["wandb", "tensorboard"]


def test_report_to_all_means_installed_trackers() -> None:
    found = names(reporting_callbacks("all"))
    assert {"tensorboard", "wandb"} <= set(found) and not set(found) & {*ABSENT, "flyte"}
    assert names(reporting_callbacks(["all"])) == found


def test_the_names_are_those_of_transformers() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    documented = set(INTEGRATION_TO_CALLBACK) - {"neptune", "kubeflow"}  # not among the values of report_to there
    assert set(TRACKERS) == documented
    assert {row.name: row.callback for row in ROWS} == {n: INTEGRATION_TO_CALLBACK[n].__name__ for n in documented}


@pytest.mark.parametrize("name", ABSENT)
def test_a_missing_package_is_rejected_at_construction(tmp_path: Path, name: str) -> None:
    args = TrainingArguments(str(tmp_path), report_to=name, use_cpu=True)
    with pytest.raises(ConfigError) as error:
        Trainer(Regression(), args, train_dataset=regression_rows(8))
    row = TRACKERS[name]
    assert str(error.value).startswith(f"report_to={name}: {row.package} ")
    assert f"not installed. Run `pip install {row.install}" in str(error.value)


def test_all_problems_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = {"wandb", "mlflow"}
    monkeypatch.setattr(
        "ds_trainer.callbacks.integrations.find_spec", lambda name: None if name in hidden else real(name)
    )
    with pytest.raises(ConfigError) as error:
        reporting_callbacks(["wandb", "mlflow", "tensorbord", "none"])
    text = str(error.value)
    assert len(error.value.problems) == 4
    assert "wandb is not installed. Run `pip install wandb`, or take wandb out of report_to." in text
    assert "report_to=tensorbord is not a tracker. Did you mean 'tensorboard'?" in text
    assert "'none' cannot be combined with others" in text
    assert "wandb" not in names(reporting_callbacks("all"))


def python(code: str) -> str:
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_a_broken_package_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ds_trainer.callbacks.integrations.find_spec", lambda name: object())
        patch.setitem(sys.modules, "wandb", None)
        args = TrainingArguments("out", report_to="wandb", use_cpu=True)
        with pytest.raises(ConfigError, match=r"report_to=wandb: wandb cannot be imported .* Run `pip install wandb`"):
            Trainer(Regression(), args, train_dataset=regression_rows(8))


def test_importing_the_callbacks_imports_no_tracker() -> None:
    loaded = python(
        "import sys, ds_trainer.callbacks.integrations as i, ds_trainer.callbacks.integrations.wandb;"
        "i.reporting_callbacks(['tensorboard', 'wandb']); print(*sys.modules)"
    ).split()
    assert "ds_trainer.callbacks.integrations.wandb" in loaded
    assert not {"wandb", "mlflow", "tensorboard", "trackio", "swanlab", "transformers"} & set(loaded)


def on_two_ranks(directory: Path) -> tuple[TrainingResult, int]:
    import os

    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(directory), "WANDB_SILENT": "true"}
    arguments = {"report_to": ["tensorboard", "wandb"]}
    result = train(directory / "out", environment, arguments, after=finish_on_main)
    return result, int(os.environ["RANK"])


def finish_on_main(trainer: Trainer) -> None:
    if trainer.is_world_process_zero():
        import wandb

        wandb.finish()


def test_two_ranks_make_one_run(tmp_path: Path) -> None:
    from tests.callbacks.integrations.test_tensorboard import read, scalars
    from tests.callbacks.integrations.wandb_file import offline_runs

    result = dict((rank, result) for result, rank in pool(2).run(partial(on_two_ranks, tmp_path)))
    (run,) = offline_runs(tmp_path)
    assert run.values("train/loss") == result[0].values("loss") != []
    (directory,) = (tmp_path / "out" / "runs").iterdir()
    assert len(scalars(read(directory), "train/loss")) == 3
    ours = {"tensorboard", "wandb"}  # DeepSpeed itself imports mlflow wherever it is installed
    assert ours <= set(result[0].imported) and not ours & set(result[1].imported)


class Failing(TrainerCallback):
    """Stands for a callback of transformers whose tracker goes away."""

    def __init__(self) -> None:
        self.begun, self.logged = 0, 0

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_log(self, *arguments: Any, **kwargs: Any) -> None:
        self.logged += 1
        raise ConnectionError("the server is gone")


def test_a_reused_callback_that_fails_is_switched_off(log: Any) -> None:
    callback: Any = type("Failing", (Guarded, Failing), {"name": "swanlab"})()
    callback.on_train_begin(None, None, None)
    for _ in range(3):
        callback.on_log(None, None, None, logs={"loss": 1.0})
    assert (callback.begun, callback.logged) == (1, 1)
    assert log.text.count("swanlab failed and is disabled") == 1 and "the server is gone" in log.text


def test_names_of_metrics() -> None:
    from transformers.integrations.integration_utils import rewrite_logs as reference

    logs = dict.fromkeys(["loss", "eval_loss", "test_f1", "eval_", "evaluation", "test", "train_loss", "eval"], 1.0)
    assert rewrite_logs(logs) == reference(logs)


def test_secrets_at_any_depth() -> None:
    values = {"hub_token": "x", "a": [{"api_key": "y", "num_token": 3}], "pad_token_id": 0, "b": {"PASSWORD": "z"}}
    assert without_secrets(values) == {
        "hub_token": "<HUB_TOKEN>",
        "a": [{"api_key": "<API_KEY>", "num_token": 3}],
        "pad_token_id": 0,
        "b": {"PASSWORD": "<PASSWORD>"},
    }


@pytest.mark.parametrize(
    ("tracker", "variable", "value", "message"),
    [
        ("mlflow", "MLFLOW_TAGS", "team=vision", "must be a JSON object"),
        ("mlflow", "MLFLOW_MAX_LOG_PARAMS", "few", "must be a whole number of parameters"),
        ("mlflow", "DISABLE_MLFLOW_INTEGRATION", "TRUE", "DISABLE_MLFLOW_INTEGRATION=TRUE"),
        (
            "wandb",
            "WANDB_LOG_MODEL",
            "end",
            "WANDB_LOG_MODEL=end uploads checkpoints, but save_strategy=no writes none",
        ),
        ("wandb", "WANDB_LOG_MODEL", "sometimes", "use one of checkpoint, end, false"),
        ("wandb", "WANDB_WATCH", "everything", "use one of gradients, parameters, all, false"),
    ],
)
def test_invalid_settings_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, variable: str, value: str, message: str
) -> None:
    pytest.importorskip(tracker)
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("WANDB_MODE", "offline")  # without it a key is wanted first
    args = TrainingArguments(str(tmp_path), report_to=tracker, save_strategy="no", use_cpu=True)
    with pytest.raises(ConfigError, match=message):
        Trainer(Regression(), args, train_dataset=regression_rows(8))

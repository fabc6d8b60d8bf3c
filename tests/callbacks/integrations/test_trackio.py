"""Trackio: its database on disk read back. What goes to the Hub needs a network: it is looked at where it is called."""

from __future__ import annotations

import importlib
import inspect
import json
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.callbacks.integrations.trackio import TrackioCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from tests.callbacks.integrations.support import TOKEN, TrainingResult, TransformersCallback, files_with, train
from tests.support.models import Regression
from tests.support.pool import close_pools, pool


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trackio reads its directory once, when it is imported: new ranks for this file, and none of them afterwards."""
    close_pools()
    yield tmp_path_factory.mktemp("trackio")
    close_pools()


def rows(directory: Path, project: str, table: str, column: str) -> list[dict[str, Any]]:
    connection = sqlite3.connect(directory / "data" / f"{project}.db")
    try:
        found = connection.execute(f"SELECT run_name, {column} FROM {table} ORDER BY id").fetchall()
    finally:
        connection.close()
    return [{"run": name, **json.loads(text)} for name, text in found]


def finish_trackio(trainer: Trainer) -> None:
    """What the end of a process does: Trackio writes in the background."""
    import trackio

    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()


def tracked(directory: Path, arguments: dict[str, Any], **more: Any) -> TrainingResult:
    environment = {"TRACKIO_DIR": str(directory / "data")}
    (result,) = pool(1).run(partial(train, directory / "out", environment, arguments, after=finish_trackio, **more))
    return result


def values(logged: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["train/global_step"], row[name]) for row in logged if name in row]


@pytest.fixture(scope="module")
def run(directory: Path) -> TrainingResult:
    deepspeed = {"comet": {"api_key": TOKEN}}
    result = tracked(directory, {"report_to": "trackio", "project": "mine", "deepspeed": deepspeed}, llama=True)
    assert result.warnings == []
    return result


def test_values_are_those_of_the_history(directory: Path, run: TrainingResult) -> None:
    """In one run, also what was logged after the training (``test/loss``)."""
    logged = rows(directory, "mine", "metrics", "metrics")
    for curve, name in (("train/loss", "loss"), ("eval/loss", "eval_loss"), ("test/loss", "test_loss")):
        assert values(logged, curve) == run.values(name) != []
    assert len({row["run"] for row in logged}) == 1


def test_arguments_are_recorded_without_secrets(directory: Path, run: TrainingResult) -> None:
    (config,) = rows(directory, "mine", "configs", "config")
    assert config["learning_rate"] == 1e-2 and config["hidden_size"] == 32 and config["hub_token"] == "<HUB_TOKEN>"
    assert config["ds_config"]["optimizer"]["params"]["lr"] == 1e-2 and config["model/num_parameters"] == 19424
    assert files_with(TOKEN, directory / "data") == []
    assert files_with("learning_rate", directory / "data") != []


def test_names_are_those_of_transformers(directory: Path, run: TrainingResult) -> None:
    tracked(
        directory,
        {"project": "theirs", "run_name": "x"},
        llama=True,
        callbacks=(TransformersCallback("TrackioCallback"),),
    )
    ours, reference = (rows(directory, name, "metrics", "metrics") for name in ("mine", "theirs"))
    assert [set(row) for row in ours] == [set(row) for row in reference]
    assert values(ours, "train/loss") == values(reference, "train/loss")


def test_run_name(directory: Path, run: TrainingResult) -> None:
    tracked(directory, {"report_to": "trackio", "project": "named", "run_name": "third try"})
    assert {row["run"] for row in rows(directory, "named", "metrics", "metrics")} == {"third try"}


class EndRun(TrainerCallback):
    """Ends the run in the middle of the training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            import trackio

            trackio.finish()


def test_an_outage_causes_a_warning_but_the_run_continues(directory: Path, run: TrainingResult) -> None:
    result = tracked(directory, {"report_to": "trackio", "project": "broken"}, callbacks=(EndRun,))
    assert result.steps == 3 and len(result.values("loss")) == 3 and result.values("test_loss")
    (warning,) = result.warnings
    assert "trackio failed and is disabled" in warning


class Calls:
    """Stands for the functions that talk to the Hub: their real signatures bind what they are called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        for name in ("init", "freeze", "sync", "finish"):
            monkeypatch.setattr(library, name, self._stand_in(name, inspect.signature(getattr(library, name))))

    def _stand_in(self, function: str, signature: inspect.Signature) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.seen[function] = seen = dict(signature.bind(*arguments, **keywords).arguments)
            if function == "init":
                return SimpleNamespace(name="made-up", _space_id=seen["space_id"])
            return seen.get("new_space_id") or seen.get("space_id")

        return call


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "data"))
    return Calls(monkeypatch, importlib.import_module("trackio"))


def life(tmp_path: Path, **arguments: Any) -> Regression:
    """Begin and end of a training, and a push of the model."""
    ours, model, state, control = TrackioCallback(), Regression(), TrainerState(), TrainerControl()
    args = TrainingArguments(str(tmp_path), **arguments)
    ours.on_train_begin(args, state, control, model=model)
    ours.on_train_end(args, state, control, model=model)
    ours.on_push_begin(args, state, control, model=model)
    return model


def test_trackio_space_id(tmp_path: Path, calls: Calls) -> None:
    """Logs go to the Space, and a static copy with a made-up name follows."""
    model = life(tmp_path, trackio_space_id="me/space", project="My Project")
    assert calls.seen["init"]["space_id"] == "me/space" and calls.seen["init"]["resume"] == "allow"
    assert calls.seen["freeze"]["space_id"] == "me/space" and "sync" not in calls.seen
    copy = calls.seen["freeze"]["new_space_id"]
    assert copy.startswith("my-project-static-")
    assert model.model_tags == ["trackio", f"trackio:https://huggingface.co/spaces/{copy}"]


def test_trackio_bucket_id(tmp_path: Path, calls: Calls) -> None:
    life(tmp_path, trackio_bucket_id="me/bucket")
    assert calls.seen["init"]["bucket_id"] == "me/bucket" == calls.seen["sync"]["bucket_id"]


def test_trackio_static_space_id(tmp_path: Path, calls: Calls) -> None:
    life(tmp_path, trackio_space_id="me/space", trackio_static_space_id="me/copy")
    assert calls.seen.pop("freeze")["new_space_id"] == "me/copy"
    life(tmp_path, trackio_static_space_id="me/copy")  # without a Space: when the model is pushed
    assert calls.seen.pop("sync")["space_id"] == "me/copy"
    life(tmp_path, trackio_space_id="me/space", trackio_static_space_id=False)
    life(tmp_path, trackio_static_space_id=False)
    assert not {"freeze", "sync"} & set(calls.seen)


def test_a_failed_copy_causes_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    """The real function: there is no network, or no such Space."""
    trackio = importlib.import_module("trackio")
    calls = Calls(monkeypatch, trackio)
    monkeypatch.setattr(trackio, "freeze", inspect.unwrap(trackio.deploy.freeze))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    life(tmp_path, trackio_space_id="me/space", trackio_static_space_id="me/copy")
    assert "init" in calls.seen
    assert "trackio.freeze could not make the read-only copy me/copy" in log.text

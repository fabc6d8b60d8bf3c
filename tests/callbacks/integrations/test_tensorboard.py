"""TensorBoard: what the event files say, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ds_trainer import TrainerCallback, TrainingArguments
from ds_trainer.callbacks.integrations.tensorboard import TensorBoardCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from tests.callbacks.integrations.support import TOKEN, TrainingResult, files_with, refusal, train
from tests.support.models import tiny_llama
from tests.support.pool import pool


def read(directory: Path) -> EventAccumulator:
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return reader


def scalars(reader: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def text(reader: EventAccumulator, tag: str) -> str:
    (event,) = reader.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


class TheirTensorBoard:
    """Makes transformers' callback with a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter
        from transformers.integrations.integration_utils import TensorBoardCallback as TransformersCallback

        callback = TransformersCallback(SummaryWriter(log_dir=str(self.directory)))
        callback.logging_dir = str(self.directory)
        return callback


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    directory = tmp_path_factory.mktemp("tensorboard")
    job = partial(
        train,
        directory / "out",
        {"TENSORBOARD_LOGGING_DIR": str(directory / "ours")},
        {"report_to": "tensorboard", "deepspeed": {"comet": {"enabled": False, "api_key": TOKEN}}},
        llama=True,
        callbacks=(TheirTensorBoard(directory / "theirs"),),
    )
    (result,) = pool(1).run(job)
    assert result.warnings == []
    return directory, result


@pytest.mark.parametrize(
    ("tag", "name"), [("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("eval/loss", "eval_loss")]
)
def test_values_are_those_of_the_history(run: tuple[Path, TrainingResult], tag: str, name: str) -> None:
    directory, result = run
    written, logged = scalars(read(directory / "ours"), tag), result.values(name)
    assert [step for step, _ in written] == [step for step, _ in logged] and logged
    assert [value for _, value in written] == pytest.approx([value for _, value in logged], rel=1e-6)


def test_names_and_values_are_those_of_transformers(run: tuple[Path, TrainingResult]) -> None:
    directory, _ = run
    ours, reference = read(directory / "ours"), read(directory / "theirs")
    assert ours.Tags()["scalars"] == reference.Tags()["scalars"]
    assert len(ours.Tags()["scalars"]) > 10
    for tag in ours.Tags()["scalars"]:
        assert scalars(ours, tag) == scalars(reference, tag)


def test_logs_after_the_training_are_recorded(run: tuple[Path, TrainingResult]) -> None:
    directory, result = run
    assert scalars(read(directory / "ours"), "test/loss") == [
        (3, pytest.approx(result.values("test_loss")[0][1], rel=1e-6))
    ]


def test_arguments_are_recorded_without_secrets(run: tuple[Path, TrainingResult]) -> None:
    directory, _ = run
    reader = read(directory / "ours")
    arguments = json.loads(text(reader, "args"))
    assert arguments["learning_rate"] == 1e-2 and arguments["hub_token"] == "<HUB_TOKEN>"
    assert json.loads(text(reader, "model_config"))["hidden_size"] == 32
    config = json.loads(text(reader, "ds_config"))
    assert config["optimizer"]["params"]["lr"] == 1e-2 and config["comet"]["api_key"] == "<API_KEY>"
    assert files_with(TOKEN, directory / "ours") == []
    assert files_with("hub_token", directory / "ours") != []  # the search finds what is there


def test_default_directory(tmp_path: Path) -> None:
    (result,) = pool(1).run(partial(train, tmp_path, {}, {"report_to": ["tensorboard"]}))
    (directory,) = (tmp_path / "runs").iterdir()
    assert "train/loss" in read(directory).Tags()["scalars"] and result.steps == 3


def test_a_directory_that_cannot_be_created_stops_the_run_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    environment = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "file" / "logs")}
    (error,) = pool(1).run(partial(refusal, tmp_path / "out", environment, {"report_to": "tensorboard"}))
    assert error.startswith("ConfigError: report_to=tensorboard: [Errno ")
    assert "loss" not in (tmp_path / "out" / "metrics.jsonl").read_text()


class TakeAway(TrainerCallback):
    """Removes the directory of the events after the first step: the writer opens its file again for each write."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            shutil.rmtree(os.environ["TENSORBOARD_LOGGING_DIR"])


def test_an_outage_causes_a_warning_but_the_run_continues(tmp_path: Path) -> None:
    environment = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "logs")}
    job = partial(
        train, tmp_path / "out", environment, {"report_to": "tensorboard", "max_steps": 8}, callbacks=(TakeAway,)
    )
    (result,) = pool(1).run(job)
    assert result.steps == 8 and len(result.values("loss")) == 8
    (warning,) = result.warnings
    assert "tensorboard failed and is disabled" in warning and "FileNotFoundError" in warning


def test_texts_tensors_and_other_values_are_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    ours, args, state = TensorBoardCallback(), TrainingArguments(str(tmp_path)), TrainerState()
    ours.on_train_begin(args, state, TrainerControl(), model=tiny_llama())
    for state.global_step in (1, 2):
        logs = {"note": "good", "scale": torch.tensor(3.0), "many": [1, 2], "flag": True}
        ours.on_log(args, state, TrainerControl(), logs=logs)
    ours.on_train_end(args, state, TrainerControl())
    reader = read(tmp_path / "logs")
    assert scalars(reader, "train/scale") == [(1, 3.0), (2, 3.0)] and scalars(reader, "train/flag")[0] == (1, 1.0)
    assert [e.tensor_proto.string_val for e in reader.Tensors("train/note/text_summary")] == [[b"good"], [b"good"]]
    assert log.text.count("left out train/many=[1, 2] (list)") == 1


def test_a_trial_has_its_own_directory(tmp_path: Path) -> None:
    ours, args = TensorBoardCallback(), TrainingArguments(str(tmp_path))
    for name in ("first", "second"):
        state = TrainerState(is_hyper_param_search=True, trial_name=name)
        ours.on_train_begin(args, state, TrainerControl())
        ours.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
        ours.on_train_end(args, state, TrainerControl())
    assert sorted(path.name for path in tmp_path.glob("runs/*/*")) == ["first", "second"]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    ours, args = TensorBoardCallback(), TrainingArguments(str(tmp_path))
    state = TrainerState(is_world_process_zero=False)
    ours.on_train_begin(args, state, TrainerControl())
    ours.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
    ours.on_train_end(args, state, TrainerControl())
    assert list(tmp_path.iterdir()) == []

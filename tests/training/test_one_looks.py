"""What one rank can look up, one rank looks up: files and listings of a training, rank by rank."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainerState, TrainingArguments, TrainingStopped
from ds_trainer.checkpoint.background.background_save import THREAD_NAME
from tests.support.file_access import opened
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool


class AsksToStop(TrainerCallback):
    """A person who puts a file into the output directory."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.max_steps > 1000:
            (Path(args.output_dir) / "STOP").touch()


def trainer_of(output_dir: str, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(max_steps=4, save_steps=1, logging_steps=1, use_cpu=True, disable_tqdm=True)
    args = TrainingArguments(output_dir, **{**values, "per_device_train_batch_size": 2, **arguments})
    return Trainer(
        tiny_llama(), args, train_dataset=RaggedTokens(40), eval_dataset=RaggedTokens(4), callbacks=[AsksToStop()]
    )


def looked_at(output_dir: str, **arguments: Any) -> tuple[list[str], str]:
    """The manifests that this rank read and the folders that it listed (``.`` is the output directory), and the end."""
    trainer, end = trainer_of(output_dir, **arguments), ""
    with opened(Path(output_dir)) as names:
        try:
            trainer.train()
        except TrainingStopped as stopped:
            end = f"{stopped.checkpoint}, best {trainer.state.best_model_checkpoint}"
        else:
            end = f"best {trainer.state.best_model_checkpoint}"
    trainer.engine.close()
    return [name for name in names if name == "." or name.endswith("manifest.json")], end


@pytest.mark.parametrize("background", [True, False])
def test_only_the_main_process_reads_the_best_checkpoint(background: bool, tmp_path: Path) -> None:
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    best |= {"greater_is_better": True, "save_async": background}  # losses fall: the first stays the best
    (_, end), (seen, other_end) = pool(2).run(looked_at_with, str(tmp_path), best)
    assert end == other_end == f"best {tmp_path / 'checkpoint-1'}"
    assert seen == []


def looked_at_with(output_dir: str, arguments: dict[str, Any]) -> tuple[list[str], str]:
    return looked_at(output_dir, **arguments)


def test_file_access_of_a_stop_and_a_restart(tmp_path: Path) -> None:
    long = {"save_steps": 10_000, "max_steps": 10_000}
    (_, end), (seen, other_end) = pool(2).run(looked_at_with, str(tmp_path), long)
    assert end == other_end and end.startswith(str(tmp_path / "checkpoint-"))
    assert seen == []
    first = Path(end.partition(",")[0]).name
    _, (seen, _) = pool(2).run(looked_at_with, str(tmp_path), {**long, "auto_resume": True})
    # Its files are compared with it, the layout is, and the report names it: once each, however many there are.
    assert seen == [f"{first}/manifest.json"] * 3


def texts_made(output_dir: str, save_async: bool) -> list[str]:
    """The threads in which this rank wrote out the trainer's state for checkpoints."""
    made: list[str] = []
    to_json = TrainerState.to_json

    def noted(self: TrainerState) -> str:
        made.append(threading.current_thread().name)
        return to_json(self)

    TrainerState.to_json = noted  # type: ignore[method-assign]
    try:
        trainer = trainer_of(output_dir, save_async=save_async)
        trainer.train()
    finally:
        TrainerState.to_json = to_json  # type: ignore[method-assign]
    trainer.engine.close()
    return made


def test_one_rank_writes_the_history_in_the_background(tmp_path: Path) -> None:
    one, other = pool(2).run(texts_made, str(tmp_path), True)
    assert one == [THREAD_NAME] * 4 + ["MainThread"] and other == []  # the last: trainer_state.json of the whole run
    for step in range(1, 5):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["global_step"] == step and [entry["step"] for entry in state["log_history"]] == [
            *range(1, step + 1)
        ]


def test_one_rank_writes_the_history_of_a_foreground_save(tmp_path: Path) -> None:
    one, other = pool(2).run(texts_made, str(tmp_path), False)
    assert one == ["MainThread"] * 5 and other == []


def test_a_snapshot_of_the_state_does_not_change() -> None:
    counter = {"args": {}, "attributes": {"seen": [1]}}
    state = TrainerState(global_step=3, log_history=[{"loss": 1.0, "step": 3}], stateful_callbacks={"C": counter})
    before, copy = state.to_json(), state.snapshot()
    state.log_history[0]["loss"] = 2.0
    state.log_history.append({"step": 4})
    counter["attributes"]["seen"].append(2)
    assert copy.to_json() == before != state.to_json()

"""Tasks beside the language model: classification, and TRL's trainers, each from a recipe to a model that loads."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_trainer.cli.main import main
from ds_trainer.recipes.classification_job import classification_metrics
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from tests.cli.test_init import ROWS
from tests.support.chat_model import save_chat_model
from tests.support.pool import pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    save_chat_model(path / "base")
    for name in ("preferences", "labels"):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return path


def recipe(folder: Path, task: str, data: str, **more: Any) -> Path:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "base"), **more},
        "task": task,
        "data": {"train": str(folder / data), "held_out": 8, "max_length": 64},
        "arguments": {
            "output_dir": str(folder / "runs" / task),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
        },
    }
    path = folder / f"{task}.yaml"
    path.write_text(json.dumps(values))
    return path


def train(path: Path) -> int:
    return main(["train", str(path)])


def results_of(folder: Path, task: str, data: str) -> dict[str, Any]:
    """Train ``task`` on ``data``, and what the run reports."""
    assert pool(1).run(partial(train, recipe(folder, task, data))) == [0]
    results: dict[str, Any] = json.loads((folder / "runs" / task / "results.json").read_text())
    assert results["steps"] == 4
    assert results["samples"]["train"] + results["samples"]["eval"] == len(ROWS["labels"])
    assert math.isfinite(results["evaluation"]["eval_loss"])
    return results


def test_classification_from_a_recipe(folder: Path) -> None:
    results_of(folder, "classification", "labels.jsonl")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "runs" / "classification")
    assert set(model.config.id2label.values()) == {row["label"] for row in ROWS["labels"]}


def test_the_data_must_be_for_the_task(folder: Path) -> None:
    from ds_trainer.recipes.record_reading import read_split

    spec = load_recipe(recipe(folder, "dpo", "labels.jsonl")).data
    with pytest.raises(ConfigError, match="takes samples of the kind preference, but these are text"):
        read_split(spec, "preference", "dpo")


def test_what_a_recipe_of_a_task_cannot_have(folder: Path) -> None:
    path = recipe(folder, "classification", "labels.jsonl")
    for override, message in (
        ("--data.max_length=null", "set data.max_length"),
        ("--task.options={beta: 1}", "label_key and text_pair_key"),
        ("--task.name=dop", "expected one of"),
        ("--model.quantization={load_in_4bit: true}", "quantized weights cannot be trained"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_recipe(path, [override])


def test_metrics_of_a_classifier() -> None:
    logits = np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.0, 5.0]])
    found = classification_metrics(SimpleNamespace(predictions=logits, label_ids=np.array([0, 1, 1, 1])))
    assert found["accuracy"] == 0.75
    assert found["f1_macro"] == pytest.approx((2 / 3 + 4 / 5) / 2)

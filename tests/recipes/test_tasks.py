"""Tasks beside the language model, each from a recipe to a model that loads; their samples in Arrow files."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_trainer.cli.main import main
from ds_trainer.recipes.classification_job import LabeledRows, classification_metrics
from ds_trainer.recipes.embedding_formats import read_row
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.recipes.task_data import Reading, TaskData, read_task_data
from ds_trainer.samples.sources.rows import SourceRow
from ds_trainer.utils.errors import ConfigError
from tests.cli.test_init import ROWS
from tests.support.chat_model import save_chat_model
from tests.support.pool import pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    save_chat_model(path / "base")
    for name in ("preferences", "labels"):
        write_rows(path / f"{name}.jsonl", ROWS[name])
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(folder: Path, task: str, data: str, **more: Any) -> Path:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "base"), **more},
        "task": task,
        "data": {"train": str(folder / data), "held_out": 8, "max_length": 64, "prepared_dir": str(folder / "cache")},
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


def train(path: Path, *overrides: str) -> int:
    return main(["train", str(path), *overrides])


def results_of(folder: Path, task: str, data: str, *overrides: str, ranks: int = 1) -> dict[str, Any]:
    """Train ``task`` on ``data``, and what the run reports."""
    path = recipe(folder, task, data)
    batch = f"--arguments.per_device_train_batch_size={4 // ranks}"
    assert pool(ranks).run(partial(train, path, batch, *overrides)) == [0] * ranks
    results: dict[str, Any] = json.loads((folder / "runs" / task / "results.json").read_text())
    assert results["steps"] == 4
    assert results["samples"]["train"] + results["samples"]["eval"] == len(ROWS["labels"])
    assert math.isfinite(results["evaluation"]["eval_loss"])
    return results


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """What must not depend on the layout."""
    timing = ("runtime", "per_second")
    found = {
        key: value
        for key, value in results["evaluation"].items()
        if not any(word in key for word in timing) and isinstance(value, float)
    }
    return {"train_loss": results["train_loss"], **found}


def check_two_ranks(
    folder: Path, task: str, data: str, *overrides: str, stages: tuple[int, ...] = (2, 3)
) -> dict[str, Any]:
    """Two ranks have the numbers of one; returns the results of one."""
    one = results_of(folder, task, data, *overrides)
    for stage in stages:
        two = results_of(folder, task, data, f"--arguments.zero_stage={stage}", *overrides, ranks=2)
        assert numbers(two) == pytest.approx(numbers(one), rel=2e-4, abs=2e-5)
    return one


def check_resume(folder: Path, task: str, data: str, *overrides: str) -> None:
    """A run that ends after two steps and goes on has the weights of one that was not interrupted."""
    from safetensors.numpy import load_file

    weights = folder / "runs" / task / "model.safetensors"
    constant = ["--arguments.lr_scheduler_type=constant", *overrides]
    results_of(folder, task, data, *constant)
    whole = load_file(weights)
    saves = ["--arguments.save_strategy=steps", "--arguments.save_steps=2", *constant]
    half = ["--arguments.per_device_train_batch_size=4", *saves, "--arguments.max_steps=2"]
    assert pool(1).run(partial(train, recipe(folder, task, data), *half)) == [0]
    assert any((load_file(weights)[name] != values).any() for name, values in whole.items())
    results_of(folder, task, data, *saves, "--arguments.auto_resume=true")
    for name, values in load_file(weights).items():
        np.testing.assert_array_equal(values, whole[name])


@pytest.mark.extended
def test_classification_from_a_recipe(folder: Path) -> None:
    check_two_ranks(folder, "classification", "labels.jsonl")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "runs" / "classification")
    assert set(model.config.id2label.values()) == {row["label"] for row in ROWS["labels"]}
    assert len(list((folder / "cache").glob("*.records"))) == 1  # three runs, five ranks


def test_the_samples_of_a_task_are_prepared_before_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without TRL, which the run needs."""
    path = recipe(folder, "dpo", "preferences.jsonl")
    files = []
    for _ in range(2):
        assert main(["data", "prepare", str(path)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("28 samples to train on, 8 for evaluation, in ")
        files.append(Path(printed.strip().rpartition(" in ")[2], "train.arrow").stat().st_ino)
    assert files[0] == files[1]


@pytest.mark.extended
def test_a_dry_run_of_a_task(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = recipe(folder, "classification", "labels.jsonl")
    assert main(["train", str(path), "--dry-run", "64", "--arguments.zero_stage=3"]) == 0
    output = capfd.readouterr().out
    assert "LlamaForSequenceClassification" in output
    assert "28 samples" in output and "rank 0 of 64 ranks succeeded" in output


def test_the_data_must_be_for_the_task(folder: Path) -> None:
    spec = load_recipe(recipe(folder, "dpo", "labels.jsonl")).data
    with pytest.raises(ConfigError, match="takes samples of the kind preference, but these are text"):
        read_task_data(spec, preferences())


def preferences() -> Reading:
    return Reading("dpo", "preference", lambda record: record.fields, __name__)


def read_preferences(path: Path, *overrides: str) -> TaskData:
    return read_task_data(load_recipe(recipe(path, "dpo", "data.jsonl"), overrides).data, preferences())


def by_prompt(row: dict[str, Any]) -> str:
    return str(row["prompt"])


def rows_in_a_process(path: Path, queue: Any) -> None:
    found = read_preferences(path)
    queue.put((found.train.to_list(), found.eval.to_list(), found.directory.stat().st_ino))


def test_samples_are_written_once_and_found_by_their_content(tmp_path: Path) -> None:
    write_rows(tmp_path / "data.jsonl", ROWS["preferences"])
    context = get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=rows_in_a_process, args=(tmp_path, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [found[0]] * 4  # also the same directory: it was written once
    train_rows, eval_rows, _ = found[0]
    assert len(eval_rows) == 8
    assert sorted(train_rows + eval_rows, key=by_prompt) == sorted(ROWS["preferences"], key=by_prompt)

    first = read_preferences(tmp_path).directory
    table = first / "train.arrow"
    table.write_bytes(table.read_bytes()[:-100])
    assert read_preferences(tmp_path).train.to_list() == train_rows  # written again
    write_rows(tmp_path / "data.jsonl", [*ROWS["preferences"], {"prompt": "a", "chosen": "b", "rejected": "c"}])
    other = read_preferences(tmp_path)
    assert other.directory != first
    assert len(other.train) == len(train_rows) + 1
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_weights_of_sources(tmp_path: Path) -> None:
    for name, count in (("a", 20), ("b", 60)):
        rows = [{"prompt": f"{name} {n}", "chosen": "x", "rejected": "y"} for n in range(count)]
        write_rows(tmp_path / f"{name}.jsonl", rows)

    def prompts(seed: int = 1, **weights: float) -> list[str]:
        train = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in weights.items()]
        overrides = [f"--data.train={json.dumps(train)}", "--data.held_out=0"]
        spec = load_recipe(recipe(tmp_path, "dpo", "a.jsonl"), overrides).data
        return [str(row["prompt"]) for row in read_task_data(spec, preferences(), seed).train]

    found = prompts(a=3, b=1)
    counts = Counter(found)
    assert len(found) == 80
    assert {counts[f"a {n}"] for n in range(20)} == {3}
    assert sum(count for name, count in counts.items() if name.startswith("b")) == 20 == len(counts) - 20
    assert prompts(a=3, b=1) == found != prompts(seed=2, a=3, b=1)
    with pytest.raises(ConfigError, match="gets none of 80 samples"):
        prompts(a=1, b=1e-6)


def test_bad_lines_of_a_task(tmp_path: Path) -> None:
    rows = [*ROWS["preferences"], {"chosen": "x", "rejected": "y"}, {"prompt": "p", "chosen": "z"}]
    write_rows(tmp_path / "data.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        read_preferences(tmp_path)
    lines = str(caught.value)
    assert "data.jsonl:37: has 'chosen' (a text), 'rejected' (a text), but the first sample has 'chosen'" in lines
    assert "data.jsonl:38: no key 'rejected'" in lines
    found = read_preferences(tmp_path, "--data.bad_lines=skip")
    assert found.samples() == {"train": 28, "eval": 8, "bad_lines": 2}


def test_keys_that_no_rule_of_a_task_reads(tmp_path: Path) -> None:
    rows = [
        {**row, "rating": number, "margin": 1 if number else None} for number, row in enumerate(ROWS["preferences"])
    ]
    write_rows(tmp_path / "data.jsonl", rows)
    for found in (read_preferences(tmp_path), read_preferences(tmp_path)):  # the second one is found in its files
        trained = len(found.train)
        assert found.unread["rating"] == trained and found.unread["margin"] in (trained, trained - 1)
    labeled = LabeledRows(load_recipe(recipe(tmp_path, "classification", "labels.jsonl")))
    assert labeled(SourceRow("x:1", {"text": "a", "label": 3, "id": 7, "note": None})).unread == ("id",)
    pair = {"anchor": "a", "positive": "b", "negative_2": "c"}
    assert read_row(SourceRow("x:1", pair)).unread == ("negative_2",)


def test_columns_that_only_later_samples_have(tmp_path: Path) -> None:
    """More than a batch of rows of the writer, of which the last ones have a further key."""
    turn = {"role": "assistant", "content": "a"}
    rows = [{"chosen": [{**turn, "content": f"{n}"}], "rejected": [turn]} for n in range(1500)]
    rows[-1]["chosen"] = [{**turn, "name": "n"}]
    write_rows(tmp_path / "data.jsonl", rows)
    found = read_task_data(load_recipe(recipe(tmp_path, "dpo", "data.jsonl")).data, preferences())
    assert len(found.train) + len(found.eval) == 1500


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

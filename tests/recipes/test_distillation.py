"""The section ``distillation`` of a recipe: the teacher is checked and learned from; a resumed run is the same."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.cli.main import main
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE
from tests.cli.test_init import PAIRS
from tests.support.chat_model import chat_tokenizer, save_chat_model
from tests.support.pool import pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distillation")
    save_chat_model(path / "student")
    save_chat_model(path / "teacher", seed=1, hidden_size=48)
    save_chat_model(path / "other", seed=1)
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(path / "other")
    rows = [{"prompt": f"say {pair}: ", "completion": pair} for pair in PAIRS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, **distillation: Any) -> Path:
    values = {
        "model": {"path": str(folder / "student")},
        "distillation": {"teacher": str(folder / "teacher"), **distillation},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "held_out": 8,
            "max_length": 64,
            "prepared_dir": str(folder / "p"),
        },
        "arguments": {
            "output_dir": str(folder / "run"),
            "max_steps": 4,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
        },
    }
    path = folder / "r.yaml"
    path.write_text(json.dumps(values))
    return path


def results_of(folder: Path, path: Path, *overrides: str, ranks: int = 1) -> dict[str, Any]:
    size = f"--arguments.per_device_train_batch_size={8 // ranks}"
    argv = ["train", str(path), size, *overrides]
    assert pool(ranks).run(partial(main, argv)) == [0] * ranks
    results: dict[str, Any] = json.loads((folder / "run" / "results.json").read_text())
    return results


def test_a_recipe_with_a_teacher(folder: Path) -> None:
    plain = results_of(folder, recipe(folder, hard_loss_weight=1.0))
    taught = results_of(folder, recipe(folder, hard_loss_weight=0.0))
    assert abs(plain["train_loss"] - taught["train_loss"]) > 0.1
    two = results_of(folder, recipe(folder, hard_loss_weight=0.0), "--arguments.zero_stage=3", ranks=2)
    assert two["train_loss"] == pytest.approx(taught["train_loss"], rel=1e-5)
    assert two["evaluation"]["eval_loss"] == pytest.approx(taught["evaluation"]["eval_loss"], rel=1e-5)
    assert two["recipe"]["distillation"]["teacher"] == str(folder / "teacher")


def test_it_goes_on_after_an_interruption(folder: Path) -> None:
    saves = ["--arguments.save_strategy=steps", "--arguments.save_steps=2"]
    whole = results_of(folder, recipe(folder))
    results_of(folder, recipe(folder), *saves, "--arguments.max_steps=2")
    rest = results_of(folder, recipe(folder), *saves, "--arguments.auto_resume=true")
    assert rest["evaluation"] == whole["evaluation"]
    longer = [*saves, "--arguments.auto_resume=true", "--arguments.max_steps=6", "--arguments.strict_resume=true"]
    argv = ["train", str(recipe(folder, temperature=3.0)), "--arguments.per_device_train_batch_size=8", *longer]
    assert pool(1).run(partial(main, argv)) == [CANNOT_WORK]  # the temperature is another one
    assert pool(1).run(partial(main, [*argv, "--arguments.allow_changed_on_resume=[distillation]"])) == [DONE]


def test_the_recipe_of_the_package_trains_in_small(folder: Path) -> None:
    """With packed rows, bf16 and ZeRO-3."""
    changes = {
        "model.path": folder / "student",
        "distillation.teacher": folder / "teacher",
        "data.train": folder / "rows.jsonl",
        "data.max_length": 64,
        "data.held_out": 8,
        "data.prepared_dir": folder,
        "arguments.output_dir": folder / "run",
        "arguments.max_steps": 2,
        "arguments.save_strategy": "no",
        "arguments.use_cpu": "true",
    }
    path = Path(__file__).parents[2] / "ds_configs" / "recipes" / "distillation.yaml"
    results = results_of(folder, path, *(f"--{key}={value}" for key, value in changes.items()))
    assert results["steps"] == 2
    assert math.isfinite(results["evaluation"]["eval_loss"])


@pytest.mark.extended
def test_a_dry_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe(folder)), "--dry-run", "8", "--arguments.zero_stage=3"]) == 0
    assert "rank 0 of 8 ranks succeeded" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--distillation.temperature=0"], "distillation.temperature=0.0 must be above 0"),
        (["--distillation.hard_loss_weight=2"], "hard_loss_weight=2.0 must be between 0 and 1"),
        (["--distillation.divergence=kl"], "expected one of"),
        (["--distillation.teacher=null"], "distillation.teacher is missing"),
        (["--task.name=dpo"], "distillation is for task sft, not dpo"),
    ],
)
def test_values_that_cannot_work(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe(folder), overrides)


def test_a_teacher_with_another_tokenizer(folder: Path) -> None:
    from ds_trainer.recipes.jobs import job_of

    job = job_of(load_recipe(recipe(folder, teacher=str(folder / "other"))))
    job.prepare(job.arguments())
    with pytest.raises(ConfigError, match=r"r.yaml:1: distillation.teacher: .* differ in 1 tokens, such as '<new>'"):
        job.make_trainer(job.arguments())


def test_the_short_form(folder: Path) -> None:
    path = recipe(folder)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "distillation": values["distillation"]["teacher"]}))
    found = load_recipe(path).distillation
    assert found is not None and found.teacher == str(folder / "teacher")

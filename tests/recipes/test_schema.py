"""The JSON schema of recipes: current, complete, and it accepts and refuses what the reader does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.cli.main import main
from ds_trainer.recipes import schema
from ds_trainer.recipes.recipe import SECTIONS, load_recipe
from ds_trainer.recipes.schema import SCHEMA_FILE, recipe_schema, schema_text
from ds_trainer.utils.errors import ConfigError
from tests.support.json_schema import schema_problems

FILE = Path(schema.__file__).with_name(SCHEMA_FILE)
RECIPES = sorted((Path(__file__).parents[2] / "ds_configs" / "recipes").glob("*.yaml"))
RECIPE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": ["a.txt"], "sequence_length": 8},
    "arguments": {"learning_rate": 1e-3},
}


def problems(recipe: Any) -> list[str]:
    return list(schema_problems(recipe, recipe_schema()))


def test_the_file_is_current() -> None:
    command = "ds-trainer config --schema > ds_trainer/recipes/recipe.schema.json"
    assert FILE.read_text(encoding="utf-8") == schema_text(), f"write it anew: {command}"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema()


def test_every_key_has_a_meaning() -> None:
    for name in SECTIONS:
        for key, described in recipe_schema()["properties"][name]["anyOf"][0]["properties"].items():
            assert described.get("description"), f"{name}.{key}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_fit_and_name_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root, found = read_yaml(text, path.name)
    assert not found
    assert problems(root.plain()) == []
    line = next(line for line in text.splitlines() if "yaml-language-server" in line)
    assert (path.parent / line.rpartition("$schema=")[2]).resolve() == FILE.resolve()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("arguments", "learning_rate", "fast"),
        ("arguments", "learning_rate", "2e-4"),
        ("arguments", "learning_rte", 1e-3),
        ("arguments", "zero_stage", 1.5),
        ("arguments", "bf16", 3),
        ("arguments", "save_strategy", "sometimes"),
        ("arguments", "logging_steps", [1]),
        ("model", "path", {"a": 1}),
        ("data", "format", "doc"),
        ("data", "text_keys", "a"),
        ("report", "sample_tokens", "many"),
        ("reports", "sample_tokens", 3),
    ],
)
def test_what_the_reader_refuses_does_not_fit(section: str, key: str, value: Any, tmp_path: Path) -> None:
    recipe = {**RECIPE, section: {**RECIPE.get(section, {}), key: value}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    with pytest.raises(ConfigError):
        load_recipe(tmp_path / "r.yaml")
    assert problems(recipe)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("arguments", "learning_rate", 1),
        ("arguments", "max_steps", 1e3),
        ("arguments", "save_strategy", "epoch"),
        ("arguments", "report_to", ["tensorboard"]),
        ("arguments", "report_to", "none"),
        ("arguments", "deepspeed", {"zero_optimization": {"stage": 2}}),
        ("arguments", "evaluation_strategy", "no"),
        ("data", "train", "one.txt"),
        ("model", "peft", {"peft_type": "LORA"}),
        ("report", "sample_prompt", "x"),
    ],
)
def test_what_the_reader_accepts_fits(section: str, key: str, value: Any, tmp_path: Path) -> None:
    recipe = {**RECIPE, section: {**RECIPE.get(section, {}), key: value}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    load_recipe(tmp_path / "r.yaml")
    assert problems(recipe) == []

"""Recipes: values, and errors with their sources."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_trainer.checkpoint.protocol.checkpoint_directory import HOW_TO_RESUME
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.recipe import ModelSpec, Recipe, ReportSpec, load_recipe
from ds_trainer.utils.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "ds_configs" / "recipes"
GOOD = """\
model:
  architecture:
    model_type: llama
    hidden_size: 64
    rms_norm_eps: 1e-5
data:
  train: [a.txt, b]
  held_out_every: 10
  sequence_length: 32
arguments:
  learning_rate: 1e-3
  max_steps: 20
  eval_strategy: no
report:
  sample_prompt: "def "
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return [problem.replace(f"{path.parent}/", "") for problem in caught.value.problems]


def test_a_good_recipe(write: Write) -> None:
    path = write(GOOD)
    recipe = load_recipe(path)
    assert recipe == Recipe(
        model=ModelSpec(architecture={"model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-5}),
        data=DataSpec(train=("a.txt", "b"), held_out_every=10, sequence_length=32),
        arguments={"learning_rate": 1e-3, "max_steps": 20, "eval_strategy": "no"},
        report=ReportSpec(sample_prompt="def "),
        path=str(path),
    )
    args = recipe.training_arguments()
    assert (args.learning_rate, args.max_steps, args.seed) == (1e-3, 20, 42)
    assert recipe.where("model.architecture.hidden_size") == f"{path}:4"
    assert recipe.where("data.text_key") == str(path)


def test_every_included_recipe_is_valid() -> None:
    recipes = sorted(RECIPES.glob("*.yaml"))
    assert recipes
    for path in recipes:
        assert load_recipe(path).data.train


def test_overrides_replace_values_by_type(write: Write) -> None:
    recipe = load_recipe(
        write(GOOD),
        [
            *("--arguments.max_steps", "7"),
            "--arguments.learning_rate=2e-4",
            *("--arguments.bf16", "on"),
            *("--data.train", "c.txt"),
            "--data.exclude=[x, y]",
            *("--model.architecture.hidden_size", "128"),
            *("--report.sample_prompt", "# a: b "),
            *("--arguments.lr_scheduler_kwargs.num_cycles", "0.5"),
            *("--arguments.max_grad_norm", "0"),
            *("--arguments.seed", "1"),
            *("--arguments.seed", "2"),  # the last one counts
        ],
    )
    assert recipe.arguments["max_steps"] == 7
    assert recipe.arguments["learning_rate"] == 2e-4
    assert recipe.arguments["bf16"] is True
    assert recipe.arguments["lr_scheduler_kwargs"] == {"num_cycles": 0.5}
    assert recipe.arguments["max_grad_norm"] == 0.0
    assert recipe.arguments["seed"] == 2
    assert recipe.data.train == ("c.txt",)
    assert recipe.data.exclude == ("x", "y")
    assert recipe.model.architecture == {"model_type": "llama", "hidden_size": 128, "rms_norm_eps": 1e-5}
    assert recipe.report.sample_prompt == "# a: b "
    assert recipe.where("arguments.max_steps") == "command line"


def test_a_negative_number_is_a_value(write: Write) -> None:
    assert load_recipe(write(GOOD), ["--arguments.max_steps", "-1"]).arguments["max_steps"] == -1


def test_the_options_that_messages_name_are_accepted(write: Write) -> None:
    (words,) = re.findall(r"\(of a recipe: ([^)]*)\)", HOW_TO_RESUME)
    assert load_recipe(write(GOOD), words.split()).arguments["auto_resume"] is True


def test_an_override_can_unset_a_value(write: Write) -> None:
    recipe = load_recipe(write(GOOD), ["--model.architecture", "null", "--model.path", "some/model"])
    assert recipe.model == ModelSpec(path="some/model")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "max_steps: 20",
            "max_step: 20",
            r"recipe.yaml:12: unknown key 'arguments.max_step'. Did you mean 'max_steps'\?",
        ),
        (
            "max_steps: 20",
            "zzz: 20",
            r"recipe.yaml:12: unknown key 'arguments.zzz'. Valid keys: the .* fields of Training",
        ),
        (
            "held_out_every",
            "held_out_ever",
            r"recipe.yaml:8: unknown key 'data.held_out_ever'. Did you mean 'held_out_every'",
        ),
        ("report:", "repord:", r"recipe.yaml:14: unknown key 'repord'. Did you mean 'report'\?"),
        ("  sample_prompt", "  text_key", r"recipe.yaml:15: unknown key 'report.text_key'. It belongs in .* 'data'"),
        ("max_steps: 20", "max_steps: many", r"recipe.yaml:12: arguments.max_steps: expected int, got 'many' \(str\)"),
        ("held_out_every: 10", "held_out_every: [1]", r"recipe.yaml:8: data.held_out_every: expected int or null, got"),
        ("max_steps: 20", "max_steps: 20\n  max_steps: 21", r"recipe.yaml:13: duplicate key 'max_steps', .* line 12"),
        ("held_out_every: 10", "held_out_every: 1", r"recipe.yaml: data.held_out_every=1 must be 2 or more"),
        (
            "held_out_every: 10",
            "format: xls",
            r"recipe.yaml:8: data.format: expected one of 'auto', 'text', .* got 'xls'",
        ),
        ("sequence_length: 32", "sequence_length: 1", r"recipe.yaml: data.sequence_length=1 must be 2 or more"),
        ("  sequence_length: 32\n", "", r"recipe.yaml: data.sequence_length is missing"),
        ("train: [a.txt, b]", "train: []", r"recipe.yaml: data.train is missing"),
        (
            "held_out_every: 10",
            "held_out_every: 10\n  eval: c",
            r"recipe.yaml: data: 'eval' \(c\) and 'held_out_every'",
        ),
        ("model_type: llama", "vocab_size: 9", r"recipe.yaml: model.architecture: 'model_type' is missing"),
        ("model:\n", "model:\n  path: x\n", r"recipe.yaml: model: give either 'path' or 'architecture', but both"),
        ("learning_rate: 1e-3", "learning_rate: -1", r"recipe.yaml:11: arguments: learning_rate=-1"),
        ("learning_rate: 1e-3", "seed: x", r"recipe.yaml:11: arguments.seed: expected int, got 'x'"),
        ("sample_prompt: ", "sample_tokens: -1 #", r"recipe.yaml: report.sample_tokens=-1 must not be negative"),
    ],
)
def test_one_mistake_gives_one_problem_with_its_source(write: Write, old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    problems = problems_of(write(GOOD.replace(old, new)))
    assert len(problems) == 1
    assert re.match(problem, problems[0]), problems


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--arguments.max_step", "5"], r"command line: unknown key 'arguments.max_step'. Did you mean 'max_steps'\?"),
        (["--max_steps", "5"], r"command line: unknown key '--max_steps'. Did you mean '--arguments.max_steps'\?"),
        (
            ["--sequence_length=5"],
            r"command line: unknown key '--sequence_length'. Did you mean '--data.sequence_length'",
        ),
        (["--argument.seed", "5"], r"command line: unknown key '--argument.seed'. Did you mean '--arguments.seed'\?"),
        (["--arguments", "5"], r"command line: 'arguments' is a section; set one of its keys, as in --arguments.KEY"),
        (["--arguments.seed"], r"command line: --arguments.seed needs a value"),
        (["--arguments.seed", "--arguments.bf16=true"], r"command line: --arguments.seed needs a value"),
        (["--arguments.seed=x"], r"command line: arguments.seed: expected int, got 'x' \(str\)"),
        (["stray"], r"command line: 'stray' is not understood"),
        (
            ["--data.train.x", "1"],
            r"command line: '--data.train.x' cannot be set, because data.train is \['a.txt', 'b'\] \(rec",
        ),
        (["--arguments.seed", "-5"], r"command line: arguments: seed=-5 must be"),
    ],
)
def test_mistakes_on_the_command_line(write: Write, argv: list[str], problem: str) -> None:
    problems = problems_of(write(GOOD), *argv)
    assert len(problems) == 1
    assert re.match(problem, problems[0]), problems


def test_all_problems_are_reported_at_once(write: Write) -> None:
    text = GOOD.replace("max_steps: 20", "max_steps: many\n  lerning_rate: 1\n  seed: -1").replace("train:", "trian:")
    text = text.replace("hidden_size: 64", "hidden_size: 64\n    hidden_size: 65")
    problems = problems_of(write(text), "--report.sample_tokens", "x", "--modle.path=x")
    assert len(problems) == 7, problems


def test_an_empty_recipe_lists_missing_keys(write: Write) -> None:
    problems = problems_of(write(""))
    assert [problem.split()[1] for problem in problems] == ["model:", "data.train", "data.sequence_length"]


def test_a_recipe_is_a_mapping(write: Write) -> None:
    assert "recipe.yaml:1: a recipe is a mapping" in problems_of(write("- a\n- b\n"))[0]
    assert problems_of(write(GOOD.replace("report:\n", "report: x #")))[0].startswith("recipe.yaml:14: report must be")


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    assert "does not exist" in problems_of(tmp_path / "none.yaml")[0]
    assert "is a directory" in problems_of(tmp_path)[0]
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in problems_of(binary)[0]
    assert re.match(r"recipe.yaml:\d+: not valid YAML", problems_of(write(GOOD + "  x: [1\n"))[0])


def test_a_recipe_prints_as_plain_data(write: Write) -> None:
    assert json.loads(json.dumps(load_recipe(write(GOOD)).to_dict()))["data"]["train"] == ["a.txt", "b"]


def test_arguments_have_their_lines(tmp_path: Path) -> None:
    text = (
        "model: {path: m}\ndata: {train: d, sequence_length: 8}\narguments:\n  bf16: true\n"
        "  evaluation_strategy: epoch\n"
        "  deepspeed:\n    gradient_clipping: auto\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    with pytest.warns(FutureWarning, match="eval_strategy"):
        recipe = load_recipe(tmp_path / "r.yaml", ["--arguments.seed", "7"])
    with pytest.warns(FutureWarning, match="eval_strategy"):
        args = recipe.training_arguments()
    file = str(tmp_path / "r.yaml")
    places = {name: args.where(name) for name in ("bf16", "eval_strategy", "seed", "fp16")}
    assert places == {"bf16": f"{file}:4", "eval_strategy": f"{file}:5", "seed": "command line", "fp16": "default"}
    assert args.origins["deepspeed.gradient_clipping"] == f"{file}:7"

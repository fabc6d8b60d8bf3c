"""All problems in one list: combinations too, whatever else is wrong, and nothing that only follows from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.recipes.jobs import job_of
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from tests.config.support import said

# A file with several mistakes that depend on each other, arguments, and a part of each problem.
LISTS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (  # a conflict, and a combination that holds whichever of both values is kept
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {},
        ["bf16=False (default)", "parameter offload needs ZeRO stage 3"],
    ),
    (
        {"pipeline": {"stages": 2}, "train_batch_size": 7, "gradient_accumulation_steps": 3},
        {},
        ["gradient_accumulation_steps=1", "train_batch_size=7", "pipeline parallelism"],
    ),
    (  # a wrong value, and a combination that does not depend on it
        {"pipeline": {"stages": 2, "partition": 3}},
        {},
        ["pipeline.partition=3", "pipeline parallelism"],
    ),
    (  # a section whose only value is wrong is still there
        {"checkpoint": {"writer": {"type": "slow"}}},
        {},
        ['checkpoint.writer.type="slow"', "writers need a GPU"],
    ),
    (
        {"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 1.0}}},
        {"offload_optimizer": "cpu"},
        ["topk_ratio=1 must be", "ZenFlow needs a GPU"],
    ),
    (  # an optimizer that is not known: what TrainingArguments say of any optimizer, and nothing about another one
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23, "cuda_aware": False}}},
        {},
        ['optimizer.type="OneBitAdam"', "optimizer.params.lr=0.0004"],
    ),
    (
        {"optimizer": {"type": "OneBitLamb", "params": {"max_coeff": 10.0}}},
        {"zero_stage": 1},
        ['optimizer.type="OneBitLamb"'],
    ),
    (  # a wrong stage: nothing about what other stages need
        {"zero_optimization": {"stage": 4, "zero_hpz_partition_size": 3, "compute_grad_norm": False}},
        {"world": 4},
        ["zero_optimization.stage=4 must be"],
    ),
    ({"zero_optimization": {"stge": 3, "round_robin_gradients": 3}}, {}, ["Did you mean 'stage'?", "=3 must be true"]),
    (  # a contradiction settles which rule holds: with zero_stage=3 this would be right
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_stage": 3},
        ["zero_optimization.stage=2 in deepspeed.zero_optimization.stage, but zero_stage=3"],
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
        {"zero_stage": 2},
        ["zero_optimization.stage=1", "parameter offload needs ZeRO stage 3"],
    ),
    (  # an unknown schedule, a wrong optimizer parameter, and a combination
        {
            "scheduler": {"type": "Cosine", "params": {"warmup_num_steps": "auto"}},
            "optimizer": {"type": "AdamW", "params": {"betas": "[0.9, 0.95]", "foo": 1}},
            "managed_gradient_accumulation": False,
        },
        {},
        ['scheduler.type="Cosine"', "Write [0.9, 0.95]", "'foo'", "which micro-batch is the last"],
    ),
    (  # rules that need another package or device, beside a wrong number
        {"fp16": {"enabled": True, "hysteresis": "two"}, "gradient_clipping": -1},
        {"fp16": True, "zero_stage": 1},
        ['hysteresis="two"', "gradient_clipping=-1", "fp16 needs a GPU"],
    ),
]


def test_a_placeholder_is_one_problem(tmp_path: Path) -> None:
    """A template whose words were not replaced: one problem for each of them, and nothing about its type."""
    file = tmp_path / "template.json"
    file.write_text('{\n"train_batch_size": BATCH,\n"fp16": {"enabled": FP16,\n"loss_scale": 0}\n}')
    problems = said(deepspeed=str(file))
    assert [problem.partition(" extends")[0] for problem in problems] == [
        f"{file}:2: the unquoted string 'BATCH,'",
        f"{file}:3: the unquoted string 'FP16,'",
    ]


@pytest.mark.parametrize(("file", "arguments", "parts"), LISTS, ids=lambda value: str(value)[:50])
def test_all_problems_are_in_one_list(file: dict[str, Any], arguments: dict[str, Any], parts: list[str]) -> None:
    problems = said(deepspeed=file, **arguments)
    assert len(problems) == len(parts), problems
    for part in parts:
        assert sum(part in problem for problem in problems) == 1, (part, problems)


WRONG_FILE = '{"zero_optimization": {\n"stage": 5,\n"stge": 1}}'
OF_THE_FILE = ["{file}:2: zero_optimization.stage=5 must be", "{file}:3: unknown key zero_optimization.stge."]


def test_arguments_and_their_file_are_in_one_list(tmp_path: Path) -> None:
    """Of a script, a command line and a recipe, whose wrong arguments would otherwise hide what the file has."""
    file = tmp_path / "ds.json"
    file.write_text(WRONG_FILE)
    wanted = [part.replace("{file}", str(file)) for part in OF_THE_FILE]

    def listed(make: Callable[[], object], first: str) -> None:
        with pytest.raises(ConfigError) as error:
            make()
        problems = error.value.problems
        assert len(problems) == 3, problems
        assert all(part in problem for part, problem in zip([first, *wanted], problems, strict=True)), problems

    listed(lambda: TrainingArguments("out", seed="one", deepspeed=str(file)), "seed='one'")
    listed(lambda: TrainingArguments("out", max_grad_norm=-1, deepspeed=str(file)), "max_grad_norm=-1")
    line = ["--output_dir", "out", "--deepspeed", str(file)]
    parser = HfArgumentParser(TrainingArguments)
    listed(lambda: parser.parse_args_into_dataclasses([*line, "--seed", "one"]), "seed")
    listed(lambda: parser.parse_args_into_dataclasses([*line, "--max_grad_norm", "-1"]), "max_grad_norm=-1")
    recipe = tmp_path / "r.yaml"
    head = (
        "model: {architecture: {model_type: llama, hidden_size: 64}}\ndata: {train: nowhere.txt, sequence_length: 8}\n"
    )
    for wrong in ("max_grad_norm: -1", "seed: one"):
        recipe.write_text(f"{head}arguments:\n  {wrong}\n  deepspeed: {file}\n")
        listed(lambda: load_recipe(recipe), f"{recipe}:4: arguments")
    recipe.write_text(f"{head}arguments:\n  seed: one\n  deepspeed:\n    zero_optimization:\n      stage: 5\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe)
    assert [problem.partition(": ")[0] for problem in error.value.problems] == [f"{recipe}:4", f"{recipe}:7"]


FILES = """\
model: {path: ./no_model}
data:
  train: [nowhere.jsonl]
  max_length: 64
  chat_template: "{% for message in messages %}{{ message.content }}"
arguments:
  use_cpu: true
  report_to: none
"""
OF_FILES = [
    "r.yaml:1: model.path: './no_model' is not a directory",
    "data.train: 'nowhere.jsonl' does not exist",
    "chat_template, line 1: the chat template cannot be parsed",
]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (  # which no recipe may have: read before anything of the run is imported
            "  max_grad_norm: -1\n  deepspeed: {zero_optimization: {stge: 1}}\n",
            ["max_grad_norm=-1.0", "unknown key zero_optimization.stge", *OF_FILES],
        ),
        (  # which cannot run here
            "  zero_stage: 2\n  offload_param: cpu\n  deepspeed: {aio: {use_gds: true}}\n  output_dir: theirs\n",
            ["parameter offload needs ZeRO stage 3", "aio.use_gds", "has a model that no run", *OF_FILES],
        ),
        ("  fp16: true\n", ["fp16 needs a GPU", *OF_FILES]),
        ("  seed: 1\n", OF_FILES),
    ],
)
@pytest.mark.parametrize("task", ["", "task: dpo\n"])
def test_a_recipe_and_its_files_are_in_one_list(
    arguments: str, wanted: list[str], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The DeepSpeed file, arguments, model, data and chat template, though each of them alone ends the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(FILES + arguments + task)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        job_of(load_recipe("r.yaml", runs=True)).run()
    problems = error.value.problems
    if task:  # what a library's trainer needs
        problems = [problem for problem in problems if "Task dpo" not in problem]
    assert len(problems) == len(wanted), problems
    for part in wanted:
        assert sum(part in problem for problem in problems) == 1, (part, problems)

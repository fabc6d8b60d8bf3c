"""Wrong recipes, wrong words on the command line, wrong DeepSpeed settings in recipes, as a shell sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_trainer.cli.main import main

MODEL = "model: {architecture: {model_type: llama, hidden_size: 64}}\n"
DATA = "data: {train: nowhere.txt, sequence_length: 8}\n"
HEAD = MODEL + DATA  # lines 1 and 2; the arguments begin in line 4

# Lines below "arguments:", words after the recipe, and the sentence; {recipe} is the file.
ROWS: list[tuple[str, str, str]] = [
    # misspelt
    ("learning_rat: 1e-4", "", "{recipe}:4: unknown key 'arguments.learning_rat'. Did you mean 'learning_rate'?"),
    (
        "per_device_batch_size: 4",
        "",
        "{recipe}:4: unknown key 'arguments.per_device_batch_size'. Did you mean 'per_device_",
    ),
    ("zero_stge: 2", "", "{recipe}:4: unknown key 'arguments.zero_stge'. Did you mean 'zero_stage'?"),
    ("BF16: true", "", "{recipe}:4: unknown key 'arguments.BF16'."),
    ("bf16: true", "--arguments.zero_stge 1", "command line: unknown key 'arguments.zero_stge'. Did you mean"),
    ("bf16: true", "--argument.zero_stage 1", "'--argument.zero_stage'. Did you mean '--arguments.zero_stage'?"),
    ("bf16: true", "--zero_stage 1", "unknown key '--zero_stage'. Did you mean '--arguments.zero_stage'?"),
    ("bf16: true", "zero_stage=1", "command line: 'zero_stage=1' is not understood; write --section.key value."),
    ("lr_scheduler_type: cosin", "", "{recipe}:4: arguments: lr_scheduler_type='cosin' is not one of linear, cosine"),
    ("optim: adamw8bit", "", "optim='adamw8bit' is not one of the 43 of OptimizerNames. Did you mean 'adamw_8bit'?"),
    ("save_strategy: step", "", "{recipe}:4: arguments: save_strategy='step' is not one of"),
    ("parallelism_config: {tp: 2}", "", "parallelism_config: unknown key 'tp'."),
    # of the wrong type or unit
    ("learning_rate: 1e-4x", "", "{recipe}:4: arguments.learning_rate: expected float, got '1e-4x' (str)."),
    ("learning_rate: fast", "", "arguments.learning_rate: expected float, got 'fast' (str)."),
    ("per_device_train_batch_size: 5GB", "", "per_device_train_batch_size: expected int, got '5GB' (str)."),
    ("per_device_train_batch_size: 4.5", "", "per_device_train_batch_size: expected int, got 4.5 (float)."),
    ("max_steps: ten", "", "{recipe}:4: arguments.max_steps: expected int, got 'ten' (str)."),
    ("num_train_epochs: many", "", "arguments.num_train_epochs: expected float, got 'many' (str)."),
    ("seed: 1.5", "", "arguments.seed: expected int, got 1.5 (float)."),
    ("bf16: ja", "", "{recipe}:4: arguments.bf16: expected bool, got 'ja' (str)."),
    ("bf16: 1", "", "arguments.bf16: expected bool, got 1 (int)."),
    ("bf16: null", "", "arguments.bf16: expected bool, got null."),
    ("zero_stage: three", "", "arguments.zero_stage: expected int or null, got 'three' (str)."),
    ("gradient_accumulation_steps: [1]", "", "gradient_accumulation_steps: expected int, got the list [1]."),
    ("deepspeed: [ds.json]", "", "arguments.deepspeed: expected str or a mapping or null, got the list ['ds.json']."),
    # out of range
    ("per_device_train_batch_size: 0", "", "{recipe}:4: arguments: per_device_train_batch_size=0 must be a positive"),
    ("gradient_accumulation_steps: 0", "", "gradient_accumulation_steps=0 must be a positive integer."),
    ("max_grad_norm: -1", "", "{recipe}:4: arguments: max_grad_norm=-1.0 must be a number that is not negative."),
    ("warmup_steps: -1", "", "warmup_steps=-1.0 must be a number that is not negative."),
    ("zero_stage: 4", "", "{recipe}:4: arguments: zero_stage=4 must be 0, 1, 2, 3, or None"),
    ("bf16: true", "--arguments.zero_stage 7", "command line: arguments: zero_stage=7 must be 0, 1, 2, 3, or None"),
    ("tensor_parallel_size: 0", "", "{recipe}:4: arguments: tensor_parallel_size=0 must be a positive integer."),
    ("bf16: true", "--world-size 0", "world_size=0 must be a positive integer."),
    ("bf16: true", "--world-size -2", "world_size=-2 must be a positive integer."),
    ("offload_optimizer: gpu", "", "{recipe}:4: arguments: offload_optimizer='gpu' is not one of none, cpu, nvme."),
    # that do not go together
    ("bf16: true\n  fp16: true", "", "{recipe}: arguments: bf16 and fp16 are different precisions; keep one of them."),
    ("torch_autocast: bf16\n  bf16: true", "", "bf16 and torch_autocast=bf16 are different precisions; keep one"),
    ("fp16: true", "--device cpu", "fp16=True ({recipe}:4): fp16 needs a GPU, and this job runs on CPUs. Use bf16"),
    (
        "offload_param: cpu\n  zero_stage: 2",
        "",
        "offload_param=cpu ({recipe}:4) and zero_stage=2 ({recipe}:5): parameter offload needs ZeRO stage 3. Set",
    ),
    ("offload_optimizer: nvme", "", "offload_optimizer=nvme ({recipe}:4): offload to NVMe needs a directory"),
    ("nvme_path: /x", "", "nvme_path=/x ({recipe}:4), but nothing is offloaded to NVMe. Set offload_optimizer=nvme"),
    ("tensor_parallel_size: 3", "--world-size 4", "4 ranks cannot be divided by tensor 3 x context 1 x sequence 1 = 3"),
    (
        "parallelism_config: {tp_size: 2}\n  tensor_parallel_size: 4",
        "",
        "tensor_parallel_size=4 and parallelism_config",
    ),
    ("fsdp: full_shard", "", "fsdp=full_shard makes no sense under a DeepSpeed engine. DeepSpeed shards with ZeRO"),
    ("optim_args: lr=1", "", "optim_args=lr=1 ({recipe}:4): set learning_rate instead of 'lr'."),
    ("optim: sgd\n  optim_args: mom=1", "", "({recipe}:5): 'mom' is not an argument of SGD (optim=sgd). "),
    # a DeepSpeed configuration in the recipe: its own lines
    ("deepspeed: {zero_optimization: {stage: 5}}", "", "{recipe}:4: zero_optimization.stage=5 must be one of 0, 1, 2"),
    (
        "deepspeed:\n    zero_optimization:\n      stge: 2",
        "",
        "{recipe}:6: unknown key zero_optimization.stge. Did you mean 'stage'?",
    ),
    (
        "deepspeed:\n    zero_optimization:\n      stage: 2\n      stage: 3",
        "",
        "{recipe}:7: duplicate key 'stage', first given on line 6; remove one.",
    ),
    (
        "deepspeed:\n    zero_optimization:\n      stage: 2\n  zero_stage: 3",
        "",
        "zero_optimization.stage=2 in {recipe}:6, but zero_stage=3 ({recipe}:7). Set zero_stage=2, or write ",
    ),
    (
        "deepspeed: {gradient_clipping: 0.5}\n  max_grad_norm: 2",
        "",
        "gradient_clipping=0.5 in {recipe}:4, but max_grad_norm=2.0 ({recipe}:5). Set max_grad_norm=0.5, or write ",
    ),
    (
        "deepspeed: {train_batch_size: 64}\n  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2\n"
        "  tensor_parallel_size: 2",
        "--world-size 8",
        "train_batch_size=64 in {recipe}:4, but 4 (per_device_train_batch_size) x 2 (gradient_accumulation_steps) x 4 "
        '(data parallel: 8 ranks / tensor 2) = 32. Write 32 or "auto" there, or leave it out',
    ),
    (
        "bf16: true",
        "--arguments.deepspeed.zero_optimization.stage 9",
        "command line: zero_optimization.stage=9 must be",
    ),
    ("deepspeed: {elasticity: {}}", "", "{recipe}:4: elasticity was removed from DeepSpeed. Elastic training has been"),
    ("deepspeed: {optimizer: {type: AdmW}}", "", 'optimizer.type="AdmW" in {recipe}:4 is not a supported optimizer'),
    (
        "deepspeed: {scheduler: {type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: 1}}}",
        "",
        'scheduler.params.total_num_steps="auto" in {recipe}:4 needs the number of optimizer steps',
    ),
    # or beside it
    ("deepspeed: nowhere.json", "", "deepspeed=nowhere.json does not exist (working directory: "),
    ("bf16: true", "--arguments.deepspeed nowhere.json", "deepspeed=nowhere.json does not exist"),
    ('deepspeed: \'{"bf16": {"enabled": true}}\'', "", "bf16.enabled=true in deepspeed:1, but bf16=False (default)."),
    ("deepspeed: '{\"bf16\"}'", "", "deepspeed:1:8: a ':' is missing after the key."),
]
# Whole recipes.
ALL_MESSAGES: list[tuple[str, str]] = [
    (HEAD + "argument:\n  bf16: true\n", "{recipe}:3: unknown key 'argument'. Did you mean 'arguments'?"),
    (HEAD + "arguments: 3\n", "{recipe}:3: arguments must be a mapping, got 3."),
    (HEAD + "arguments:\n\tbf16: true\n", "{recipe}:4: not valid YAML: while scanning for the next token, found"),
    (HEAD + "arguments: {bf16: true\n", "{recipe}:4: not valid YAML: while parsing a flow mapping"),
    (HEAD + "arguments:\n  bf16: true\n  bf16: false\n", "{recipe}:5: duplicate key 'bf16', first given on line 4"),
    (HEAD + HEAD, "2 problems:"),
    (
        "- 1\n",
        "{recipe}:1: a recipe is a mapping with the sections model, task, data, arguments, report, distillation.",
    ),
    (DATA, "{recipe}: model: give either 'path' or 'architecture', but neither is given."),
    (MODEL, "{recipe}: data.train is missing"),
    ("model: {path: nowhere}\n" + DATA, "{recipe}:1: model.path: 'nowhere' is not a directory"),
]


def recipe_of(arguments: str) -> str:
    return f"{HEAD}arguments:\n  {arguments}\n"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("arguments", "message", "problem"), ROWS, ids=lambda value: str(value)[:60])
def test_wrong_arguments(
    arguments: str, message: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on standard error with the place, exit code 2, nothing on standard output."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(recipe_of(arguments))
    assert main(["config", str(recipe), *message.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ds-trainer: ") and err.count("\n") == 1
    assert problem.replace("{recipe}", str(recipe)) in err


@pytest.mark.parametrize(("text", "message"), ALL_MESSAGES, ids=lambda value: str(value)[-40:])
def test_wrong_recipes(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    assert main(["config", str(recipe)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message.replace("{recipe}", str(recipe)) in err


def test_mistakes_of_recipe_file_and_command_line_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(recipe_of("learning_rat: 1\n  bf16: ja"))
    assert main(["config", str(recipe), "--arguments.zero_stage", "7"]) == 2
    err = capsys.readouterr().err
    assert "3 problems:" in err
    assert [f"{recipe}:{line}: " in err for line in (4, 5)] == [True] * 2 and "command line: " in err
    (tmp_path / "ds.json").write_text('{"zero_optimization": {\n"stage": 5,\n"stge": 2},\n"elasticity": {}}')
    recipe.write_text(recipe_of(f"deepspeed: {tmp_path}/ds.json"))
    assert main(["config", str(recipe)]) == 2
    err = capsys.readouterr().err
    assert "3 problems:" in err
    assert [f"{tmp_path}/ds.json:{line}: " in err for line in (2, 3, 4)] == [True] * 3


def test_a_missing_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["config", str(tmp_path / "nowhere.yaml")], "nowhere.yaml' does not exist (working directory:"),
        (["config", str(tmp_path)], "is a directory; name a YAML file in it."),
        (["confg", "r.yaml"], "unknown subcommand 'confg'. Did you mean 'config'?"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err


def test_mistakes_are_reported_before_torch_or_deepspeed_is_imported(tmp_path: Path) -> None:
    """All of the table in one process: every one ends with 2, and neither torch nor deepspeed was imported."""
    commands = []
    for index, (arguments, argv, _) in enumerate(ROWS):
        recipe = tmp_path / f"{index}.yaml"
        recipe.write_text(recipe_of(arguments))
        commands.append(["config", str(recipe), *argv.split()])
    code = (
        "import json, sys; from ds_trainer.cli.main import main;"
        "codes = [main(words) for words in json.load(sys.stdin)];"
        "print(json.dumps([codes, [name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules]]))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(commands), capture_output=True, text=True, check=True
    )
    assert json.loads(completed.stdout) == [[2] * len(ROWS), []]
    assert completed.stderr.count("ds-trainer: ") == len(ROWS)


SETTLED = [
    ("deepspeed: {gradient_clipping: auto}\n  max_grad_norm: 2", "", "gradient_clipping", 2.0),
    ("deepspeed: {zero_optimization: {stage: auto}}\n  zero_stage: 3", "", "zero_optimization.stage", 3),
    ("deepspeed: {bf16: {enabled: auto}}\n  bf16: true", "", "bf16.enabled", True),
    (
        "deepspeed: {train_batch_size: auto, train_micro_batch_size_per_gpu: auto}\n  per_device_train_batch_size: 4",
        "--world-size 8",
        "train_micro_batch_size_per_gpu",
        4,
    ),
    (
        "deepspeed: {optimizer: {type: auto, params: {lr: auto, betas: auto}}}\n  learning_rate: 1e-3",
        "",
        "optimizer.params.lr",
        1e-3,
    ),
    (
        "deepspeed: {scheduler: {type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: auto}}}\n"
        "  max_steps: 50",
        "",
        "scheduler.params.total_num_steps",
        50,
    ),
    ('deepspeed: \'{"bf16": {enabled: "auto"}}\'\n  bf16: true', "", "bf16.enabled", True),
]


@pytest.mark.parametrize(("arguments", "message", "path", "value"), SETTLED, ids=[row[2] for row in SETTLED])
def test_auto_resolves_a_contradiction(
    arguments: str, message: str, path: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same with "auto" where the file contradicted: the argument's value is printed."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(recipe_of(arguments))
    assert main(["config", str(recipe), *message.split()]) == 0
    out = capsys.readouterr().out
    assert '"auto"' not in out
    found = json.loads(out)
    for name in path.split("."):
        found = found[name]
    assert found == value

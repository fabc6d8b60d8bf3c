"""``ds-trainer run``: an unchanged script gives the losses of transformers' Trainer, on our engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from ds_trainer.cli.main import main

SCRIPT = Path(__file__).with_name("script.py")
ARGUMENTS = (
    *("--output_dir", "out", "--use_cpu", "true", "--report_to", "none", "--max_steps", "8", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-2"),
    *("--optim", "adamw_torch", "--save_strategy", "steps", "--save_steps", "4", "--eval_strategy", "steps"),
    *("--eval_steps", "4", "--load_best_model_at_end", "true", "--width", "16", "--disable_tqdm", "true"),
)


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(Path(ds_trainer.__file__).parents[1]), "DS_ACCELERATOR": "cpu"},
        check=False,
        timeout=600,
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
    result: dict[str, Any] = json.loads(line.removeprefix("found "))
    return result


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script finds with transformers' own Trainer."""
    result = found(python(str(SCRIPT), *ARGUMENTS, cwd=tmp_path_factory.mktemp("reference")))
    assert result["trainer"] == "transformers.trainer"
    return result


@pytest.mark.extended
def test_an_unchanged_script_gives_the_losses_of_transformers(wanted: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ours" / "scripts").mkdir(parents=True)
    script = shutil.copy(SCRIPT, tmp_path / "ours" / "scripts" / "train.py")
    ours = python(
        *("-m", "ds_trainer.run", "--set", "zero_stage=2", "--set", "logging_steps=1"),
        *("scripts/train.py", *ARGUMENTS),
        cwd=tmp_path / "ours",
    )
    got = found(ours)
    assert got["trainer"] == "ds_trainer.training.trainer"
    assert got["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    assert got["train_loss"] == pytest.approx(wanted["train_loss"], abs=1e-5)
    assert got["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=1e-5)
    assert len(got["losses"]) == got["steps"] == 8
    assert got["zero_stage"] == 2
    assert got["origins"]["zero_stage"] == got["origins"]["logging_steps"] == "ds-trainer run --set"
    assert got["origins"]["max_steps"] == "command line"
    assert got["argv"] == ["scripts/train.py", *ARGUMENTS]
    assert got["path"] == str(Path(script).parent)
    header = next(line for line in ours.stdout.splitlines() if line.startswith("  overrides "))
    assert "zero_stage=2" in header and header.endswith("(ds-trainer run --set)")
    assert "\n  replaces   transformers' Trainer, " in ours.stdout
    assert ours.stderr.count("in place of transformers' Trainer, ") == 1
    assert "had no effect" not in ours.stderr


def test_launch_options_start_every_rank_with_the_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(shutil.copy(SCRIPT, tmp_path / "train.py"))
    argv = ["run", "--set", "zero_stage=3", "--set", "bf16=true", "--nproc-per-node", "2", "--dry-run", script]
    assert main([*argv, "--a.b", "1"]) == 0
    printed = capsys.readouterr().out
    words = f"-m ds_trainer.run --set zero_stage=3 --set bf16=true {script} --a.b 1"
    assert words in printed
    assert "--num_gpus 2" in printed or "--nproc-per-node 2" in printed


def test_a_batch_script_runs_the_script_on_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks run what `prepare` gets: a leading `-m` stands for Python."""
    script = str(shutil.copy(SCRIPT, tmp_path / "train.py"))
    sizes = ["--nodes", "2", "--nproc-per-node", "4", "--time", "1:00:00"]
    assert main(["run", "--slurm", "--set", "zero_stage=3", *sizes, script, "--a.b", "1"]) == 0
    text = capsys.readouterr().out
    arguments = " \\\n    ".join(["-m", "ds_trainer.run", "--set", "zero_stage=3", script, "--a.b", "1"])
    assert f'prepare {arguments} "$@"\n' in text
    assert "#SBATCH --time=1:00:00\n" in text and "#SBATCH --nodes=2\n" in text


# Instead: the tests of libraries, which CI runs too: tests/clients/test_clients.py
@pytest.mark.matrix
def test_two_ranks_with_zero_3_give_the_same_losses(wanted: dict[str, Any], tmp_path: Path) -> None:
    """Half the batch on each of two ranks."""
    shutil.copy(SCRIPT, tmp_path / "train.py")
    settings = ("--set", "zero_stage=3", "--set", "per_device_train_batch_size=2")
    options = ("--nproc-per-node", "2", "--launcher", "torchrun", "train.py")
    done = python("-m", "ds_trainer", "run", *settings, *options, *ARGUMENTS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found {" in line]
    assert len(results) == 2
    for result in results:
        assert result["zero_stage"] == 3
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-4)
        assert result["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=1e-4)
    assert done.stderr.count("in place of transformers' Trainer, ") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["zero_stag=3"], "--set zero_stag: unknown argument 'zero_stag'. Did you mean 'zero_stage'?"),
        (["zero_stage=many"], "--set zero_stage=many: expected int or null, got"),
        (["zero_stage=5"], "--set zero_stage=5 must be 0, 1, 2, 3, or None"),
        (["learning_rate=-1"], "--set learning_rate=-1.0 must be a number that is not negative."),
        (["optim=adam_w"], "--set optim='adam_w' is not one of"),
        (["zero_stage"], "--set zero_stage: write --set NAME=VALUE."),
        (["evaluation_strategy=no"], "of transformers 4: write eval_strategy."),
        (["fsdp=full_shard"], "--set fsdp=full_shard makes no sense"),
        (["hub_token=1", "hub_token"], "--set <HUB_TOKEN>: write --set NAME=VALUE."),
        (["bf16=perhaps", "seed=-1x"], "2 problems:"),
    ],
)
def test_a_wrong_value_is_one_error_before_the_script_starts(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the script has started')\n", encoding="utf-8")
    assert main(["run", *(part for text in settings for part in ("--set", text)), str(script)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--slrum", "train.py"], "run: unknown option '--slrum'. Did you mean '--slurm'?"),
        (["--steps", "3", "train.py"], "run: unknown option '--steps'. Place arguments of the script after it."),
        (["--time", "1:00:00", "train.py"], "--time: only with --slurm, which prints a batch script."),
        (["recipe.yaml"], "run: 'recipe.yaml' is a recipe, not a script: ds-trainer train recipe.yaml."),
        (["gone.py"], "the script 'gone.py' does not exist"),
    ],
)
def test_what_is_no_script(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *argv]) == 2
    assert message in capsys.readouterr().err


def run_script(text: str, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    return python("-m", "ds_trainer.run", *options, "train.py", cwd=tmp_path)


def test_the_exit_code_is_that_of_the_script(tmp_path: Path) -> None:
    assert run_script("raise SystemExit(7)", tmp_path).returncode == 7
    pipe = run_script("raise BrokenPipeError('of a worker')", tmp_path)
    assert pipe.returncode == 1
    assert pipe.stderr.endswith("BrokenPipeError: of a worker\n")
    failed = run_script("1 / 0", tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_value_that_no_object_received_is_reported(tmp_path: Path) -> None:
    script = "from transformers import TrainingArguments\nTrainingArguments('out', use_cpu=True)\n"
    done = run_script(script, tmp_path, "--set", "generation_num_beams=2", "--set", "seed=3")
    assert done.returncode == 0
    assert done.stderr.endswith(
        "ds-trainer: --set generation_num_beams had no effect: the script made no arguments object that has it.\n"
    )


def test_values_reach_subclasses_positions_and_constructors_of_their_own(tmp_path: Path) -> None:
    script = """\
from dataclasses import dataclass
from transformers import TrainingArguments
@dataclass
class Fields(TrainingArguments):
    extra: int = 1
    seed: int = 5
class Own(TrainingArguments):
    def __init__(self, folder):
        super().__init__(output_dir=folder, seed=6, learning_rate=1.0)
for args in (TrainingArguments('a', seed=4), Fields('b', extra=2), Own('c')):
    print(args.output_dir, args.seed, args.where('seed'), args.learning_rate, args.report_to)
print(args.where('learning_rate'), getattr(args, 'extra', None))
"""
    done = run_script(
        script, tmp_path, *("--set", "seed=7", "--set", "output_dir=here", "--set", "learning_rate=1e-3"),
        *("--set", "report_to=[tensorboard,wandb]")
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    origin = "ds-trainer run --set"
    line = f"here 7 {origin} 0.001 ['tensorboard', 'wandb']"
    assert done.stdout.splitlines() == [line, line, line, f"{origin} None"]

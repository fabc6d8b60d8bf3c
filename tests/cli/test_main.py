"""The command line as a shell sees it: arguments in, one message and an exit code out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ds_trainer
from ds_trainer.cli.argv import split_overrides, without_local_rank
from ds_trainer.cli.main import SUBCOMMANDS, main
from ds_trainer.monitor.health.divergence import TrainingDiverged

RECIPE = """\
model: {architecture: {model_type: llama, hidden_size: 8}}
data: {train: nowhere.txt, sequence_length: 8}
"""


def shell(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "ds_trainer", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(Path(ds_trainer.__file__).parents[1])} | environment,
        check=False,
        timeout=120,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ds-trainer {ds_trainer.__version__}\n"


def test_without_arguments_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    output = capsys.readouterr().out
    assert "train" in output
    assert "config" in output


def test_an_unknown_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tarin", "x.yaml"]) == 2
    assert capsys.readouterr().err == (
        f"ds-trainer: unknown subcommand 'tarin'. Did you mean 'train'? Valid subcommands: {', '.join(SUBCOMMANDS)}.\n"
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--foo"],
        ["plan", "model", "--seq-len", "abc"],
        ["plan"],
        ["data", "show"],
        ["checkpoint", "export", "run"],
        ["checkpoint", "export", "run", "--to", "x", "--dtype", "int8"],
        ["checkpoint", "merge", "run", "--to", "x", "--dtype", "int8"],
        ["chat", "run", "--dtype", "int8"],
        ["launch", "--nodes", "x", "recipe.yaml"],
    ],
)
def test_a_wrong_argument_is_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds-trainer: ") and error.count("\n") == 1 and "usage:" not in error
    assert "int8" not in argv or "the types are fp32, bf16, fp16" in error


@pytest.mark.parametrize("recipe", [[], ["recipe.yaml"]])
def test_an_abbreviated_argument_suggests_the_real_one(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(["config", *recipe, "--lr", "1e-3"]) == 2
    assert "learning_rate'?" in capsys.readouterr().err


def test_a_missing_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gone.yaml"]) == 2
    assert (
        capsys.readouterr().err
        == f"ds-trainer: The recipe 'gone.yaml' does not exist (working directory: {Path.cwd()}).\n"
    )


def test_the_recipe_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "RECIPE" in capsys.readouterr().err


def test_an_override_without_section_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    assert main(["train", str(path), "--max_steps", "5"]) == 2
    assert capsys.readouterr().err == (
        "ds-trainer: 2 problems:\n"
        "  1. command line: unknown key '--max_steps'. Did you mean '--arguments.max_steps'?\n"
        f"  2. data.train: 'nowhere.txt' does not exist (working directory: {Path.cwd()}).\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "--as-writen"], "plan: unknown option '--as-writen'. Did you mean '--as-written'?"),
        (["train", "--calibrat"], "train: unknown option '--calibrat'. Did you mean '--calibrate'?"),
        (["config", "--world_size=2"], "config: unknown option '--world_size=2'. Did you mean '--world-size'?"),
        (["data", "show", "--sampels"], "data: unknown option '--sampels'. Did you mean '--samples'?"),
    ],
)
def test_a_misspelled_option(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    assert main([*args, str(path)]) == 2
    assert capsys.readouterr().err == f"ds-trainer: {message}\n"


def test_overrides_may_be_anywhere() -> None:
    argv = ["train", "--a.b", "-1", "r.yaml", "--c.d=x y", "--explain", "--e.f", "--g.h", "v"]
    others, overrides = split_overrides(argv)
    assert others == ["train", "r.yaml", "--explain"]
    assert overrides == ["--a.b", "-1", "--c.d=x y", "--e.f", "--g.h", "v"]


def test_a_path_with_a_dot_is_not_an_override() -> None:
    assert split_overrides(["train", "./r.yaml", "--world-size", "2"]) == (
        ["train", "./r.yaml", "--world-size", "2"],
        [],
    )
    assert split_overrides(["--device=a.b"]) == (["--device=a.b"], [])


def test_local_rank_of_the_launcher_is_dropped() -> None:
    assert without_local_rank(["--local_rank=0", "train", "--local-rank=12", "r.yaml"]) == ["train", "r.yaml"]
    assert without_local_rank(["--local_rank=x"]) == ["--local_rank=x"]


def test_an_error_has_no_traceback_and_comes_before_torch(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE + "argments: {}\n")
    completed = shell("--local_rank=0", "train", "r.yaml", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert completed.returncode == 2
    assert completed.stdout == ""
    imports = [line for line in completed.stderr.splitlines() if line.startswith("import time:")]
    messages = [line for line in completed.stderr.splitlines() if line not in imports]
    assert messages == [
        "ds-trainer: 2 problems:",
        "  1. r.yaml:3: unknown key 'argments'. Did you mean 'arguments'?",
        f"  2. data.train: 'nowhere.txt' does not exist (working directory: {tmp_path}).",
    ]
    assert any(line.endswith("ds_trainer.recipes.recipe") for line in imports)
    assert not any(line.split("|")[-1].strip() == "torch" for line in imports)


def test_other_ranks_let_the_main_process_print_first(tmp_path: Path) -> None:
    started = time.monotonic()
    completed = shell("train", "gone.yaml", cwd=tmp_path, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert completed.returncode == 2
    assert time.monotonic() - started >= 3
    assert (
        completed.stderr
        == f"ds-trainer (rank 1): The recipe 'gone.yaml' does not exist (working directory: {tmp_path}).\n"
    )


@pytest.mark.extended
def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "", "--num_gpus", "2"]
    completed = subprocess.run(
        [*launcher, "--master_port", "29517", "--module", "ds_trainer", "train", "gone.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(ds_trainer.__file__).parents[1]), "DS_ACCELERATOR": "cpu"},
        check=False,
        timeout=300,
    )
    assert completed.returncode != 0
    assert completed.stderr.count("does not exist") == 1
    assert "ds-trainer: The recipe 'gone.yaml' does not exist (working directory:" in completed.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    command = f"{sys.executable} -m ds_trainer config r.yaml --device cpu --explain | true"
    env = {**os.environ, "PYTHONPATH": str(Path(ds_trainer.__file__).parents[1])}
    completed = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert completed.stderr == ""


def test_a_training_that_diverged_fails_with_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverged(argv: list[str]) -> int:
        raise TrainingDiverged("Step 3: the loss is not finite on rank 1.")

    monkeypatch.setattr("ds_trainer.cli.main._run", diverged)
    assert main(["train", "recipe.yaml"]) == 1
    assert capsys.readouterr().err == "ds-trainer: Step 3: the loss is not finite on rank 1.\n"

"""``ds-trainer launch`` with the real launchers of one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ds_trainer

RECIPE = Path(ds_trainer.__file__).parents[1] / "ds_configs" / "recipes" / "quickstart.yaml"
PROGRAM = """\
import os, signal, sys
from torch import distributed, ones
distributed.init_process_group("gloo")
total = ones(1)
distributed.all_reduce(total)
distributed.destroy_process_group()  # threads of gloo may abort a process that ends without
open(f"rank{os.environ['RANK']}", "w").write(f"{total.item()} {sys.argv[1:]}")
if sys.argv[1:] == ["killed"] and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(Path(ds_trainer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def launch(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "ds_trainer", "launch", "--nproc-per-node", "2", *argv],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_rank_killed_by_a_signal_is_not_a_success(launcher: str, tmp_path: Path) -> None:
    completed = launch(tmp_path, "--launcher", launcher, "program.py", "killed")
    assert completed.returncode == 137, completed.stderr
    assert "rank 1 on" in completed.stderr and "was killed by SIGKILL" in completed.stderr


@pytest.mark.extended
def test_the_printed_command_can_be_run(tmp_path: Path) -> None:
    printed = launch(
        tmp_path,
        "--dry-run",
        "--launcher",
        "deepspeed",
        "--env",
        "SAID=a b",
        "program.py",
        "--words",
        "are $HOME 'kept'",
    )
    assert printed.returncode == 0, printed.stderr
    assert not (tmp_path / "rank0").exists()
    assert printed.stdout.startswith("env 'SAID=a b' ") and printed.stdout.count("\n") == 1
    subprocess.run(["bash", "-c", printed.stdout], cwd=tmp_path, env=environment(), check=True, timeout=200)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == """2.0 ['--words', "are $HOME 'kept'"]"""


def test_options_are_recognized_among_recipe_overrides_but_not_after_a_script(tmp_path: Path) -> None:
    shutil.copy(RECIPE, tmp_path / "r.yaml")
    completed = launch(tmp_path, "--dry-run", "r.yaml", "--arguments.max_steps", "3", "--launcher", "deepspeed")
    assert completed.stdout.strip().endswith(
        "ds_trainer.launching.rank -m ds_trainer train r.yaml --arguments.max_steps 3"
    )
    assert "deepspeed.launcher.runner" in completed.stdout
    completed = launch(tmp_path, "--dry-run", "program.py", "--launcher", "deepspeed")
    assert (
        completed.stdout.strip().endswith("program.py --launcher deepspeed")
        and "torch.distributed.run" in completed.stdout
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--arguments.max_stepz", "unknown key 'arguments.max_stepz'. Did you mean 'max_steps'?"),
        ("--nproc_per_node", "launch: unknown option '--nproc_per_node'. Did you mean '--nproc-per-node'?"),
        ("--max_steps", "unknown key '--max_steps'. Did you mean '--arguments.max_steps'?"),
    ],
)
def test_misspelled_options_are_rejected_before_anything_starts(option: str, message: str, tmp_path: Path) -> None:
    completed = launch(tmp_path, str(RECIPE), option, "5")
    assert (completed.returncode, completed.stderr.count("\n")) == (2, 1)
    assert message in completed.stderr


def test_contradictory_variables_are_rejected_before_anything_starts(tmp_path: Path) -> None:
    broken = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    broken |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    (tmp_path / "program.py").write_text(PROGRAM)
    for argv in (["ds_trainer", "launch", "program.py"], ["ds_trainer.launching.rank", "program.py"]):
        completed = subprocess.run(
            [sys.executable, "-m", *argv],
            cwd=tmp_path,
            env=environment() | broken,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert completed.returncode == 2
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
            assert f"{name}={broken[name]}" in completed.stderr
    assert not list(tmp_path.glob("rank*"))

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


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "ds_trainer", "launch", "--nproc-per-node", "2", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_rank_killed_by_a_signal_is_not_a_success(launcher: str, tmp_path: Path) -> None:
    done = launch(tmp_path, "--launcher", launcher, "program.py", "killed")
    assert done.returncode == 137, done.stderr
    assert "rank 1 on" in done.stderr and "was killed by SIGKILL" in done.stderr


def test_the_printed_command_works_when_it_is_pasted(tmp_path: Path) -> None:
    printed = launch(
        tmp_path,
        "--print-only",
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


def test_options_may_stand_among_the_overrides_of_a_recipe_but_not_after_a_script(tmp_path: Path) -> None:
    shutil.copy(RECIPE, tmp_path / "r.yaml")
    done = launch(tmp_path, "--print-only", "r.yaml", "--arguments.max_steps", "3", "--launcher", "deepspeed")
    assert done.stdout.strip().endswith("ds_trainer.launching.rank -m ds_trainer train r.yaml --arguments.max_steps 3")
    assert "deepspeed.launcher.runner" in done.stdout
    done = launch(tmp_path, "--print-only", "program.py", "--launcher", "deepspeed")
    assert done.stdout.strip().endswith("program.py --launcher deepspeed") and "torch.distributed.run" in done.stdout


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--arguments.max_stepz", "unknown key 'arguments.max_stepz'. Did you mean 'max_steps'?"),
        ("--nproc_per_node", "launch: unknown option '--nproc_per_node'. Did you mean '--nproc-per-node'?"),
        ("--max_steps", "unknown key '--max_steps'. Did you mean '--arguments.max_steps'?"),
    ],
)
def test_a_slip_is_refused_before_anything_starts(word: str, says: str, tmp_path: Path) -> None:
    done = launch(tmp_path, str(RECIPE), word, "5")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


def test_a_contradiction_is_refused_with_all_values_before_anything_starts(tmp_path: Path) -> None:
    broken = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    broken |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    (tmp_path / "program.py").write_text(PROGRAM)
    for words in (["ds_trainer", "launch", "program.py"], ["ds_trainer.launching.rank", "program.py"]):
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env=environment() | broken,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 2
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
            assert f"{name}={broken[name]}" in done.stderr
    assert not list(tmp_path.glob("rank*"))

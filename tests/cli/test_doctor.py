"""``ds-trainer doctor``: what it prints, its exit codes, alone and on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.cli.main import main
from ds_trainer.utils.ranks import free_port

ROOT = Path(__file__).parents[2]
OTHER_ON_RANK_1 = """
import os, sys
from ds_trainer.arguments import training_arguments
from ds_trainer.cli.main import main
from ds_trainer.monitor.doctor import examination

versions = examination.versions
if os.environ["RANK"] == "1":
    examination.versions = lambda: {**versions(), "deepspeed": "0.18.0"}
    sys.argv.append("--learning_rate=0.5")
sys.exit(main())
"""


def started(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, timeout=240, check=False)


@pytest.mark.extended
def test_differences_between_ranks_are_reported(tmp_path: Path) -> None:
    """Two ranks under torchrun; one has another version and another argument. The gradient is right nevertheless."""
    script = tmp_path / "doctor.py"
    script.write_text(OTHER_ON_RANK_1)
    launcher = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port())]
    launcher[0] = str(Path(sys.executable).with_name("torchrun"))
    options = ["doctor", "--json", "--use_cpu", "true", "--zero_stage", "2", "--bf16", "true"]
    completed = started([*launcher, str(script), *options], XDG_CACHE_HOME=str(tmp_path))
    assert completed.returncode != 0
    answer: dict[str, Any] = json.loads(completed.stdout)
    assert (answer["world_size"], answer["exit_code"]) == (2, 1)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert [name for name in found if found[name]["level"] == "FAIL"] == ["deepspeed", "arguments"]
    assert "on rank 0 (" in found["deepspeed"]["message"]
    assert "but 0.18.0 on rank 1 (" in found["deepspeed"]["message"]
    assert "learning_rate differs: 5e-05 on rank 0" in found["arguments"]["message"]
    assert found["gradient, ZeRO-2 bf16"]["message"].startswith("equal to plain PyTorch on 2 ranks")
    assert "GB/s bus bandwidth" in found["all-reduce"]["message"]


@pytest.mark.extended
def test_one_machine_with_a_stale_lock(tmp_path: Path) -> None:
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    hours_ago = time.time() - 7200
    os.utime(lock, (hours_ago, hours_ago))
    command = [sys.executable, "-m", "ds_trainer", "doctor", "--no-gradients"]
    completed = started(command, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert completed.returncode == 1, completed.stderr
    lines = completed.stdout.splitlines()
    (line,) = (index for index, line in enumerate(lines) if line.startswith("FAIL"))
    assert "lock of fused_adam" in lines[line]
    assert lines[line + 1].split() == ["->", "rm", str(lock)]
    assert lines[-1].endswith("1 failure")
    lock.unlink()
    completed = started(command, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert (completed.returncode, "FAIL" in completed.stdout) == (0, False), completed.stdout


@pytest.mark.parametrize("command", ["config", "doctor"])
@pytest.mark.parametrize("args", [["--help"], ["recipe.yaml", "--help"]])
def test_help_lists_the_recipe_as_its_usage_does(
    command: str, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, *args])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert f"ds-trainer {command} [RECIPE]" in text and "\n  RECIPE " in text and "--recipe" not in text


@pytest.mark.parametrize("argv", [["--zero_stag", "2"], ["--timeout", "0"], ["no-such.yaml"]])
def test_usage_errors_are_reported_before_anything_starts(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert capsys.readouterr().err.startswith("ds-trainer: ")

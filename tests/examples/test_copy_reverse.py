"""The example learns its task for real, under ZeRO-3 with two ranks, and says so in its metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ds_trainer.utils.ranks import free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "copy_reverse.py"
sys.path.insert(0, str(EXAMPLE.parent))

import copy_reverse  # noqa: E402


def test_held_out_samples_are_not_trained_on() -> None:
    train, held_out = copy_reverse.pairs()
    known = {tuple(row["input_ids"]) for row in train}
    assert len(held_out) == copy_reverse.HELD_OUT
    assert not [row for row in held_out if tuple(row["input_ids"]) in known]
    assert all(row["labels"][:-1] == row["input_ids"][-2::-1] for row in held_out)


def test_it_learns_to_write_backwards_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", "", "--num_gpus", "2"]
    command += ["--master_port", str(free_port()), "--no_local_rank", str(EXAMPLE), "--output_dir", str(out)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [*command, "--use_cpu", "true"], env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    metrics = json.loads((out / "all_results.json").read_text(encoding="utf-8"))
    assert metrics["eval_held_out_exact_match"] > 0.9
    assert json.loads((out / "ds_config.json").read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 3

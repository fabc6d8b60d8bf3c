"""Jobs that tests hand to the cluster: the environment of a user, words of sbatch, and what a run wrote."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 6
# The quickstart, small enough for the processes of several jobs on two cores.
RECIPE = "ds_configs/recipes/quickstart.yaml"
SMALL = [
    *("--model.architecture.hidden_size", "32"),
    *("--model.architecture.intermediate_size", "48"),
    *("--model.architecture.num_hidden_layers", "2"),
    *("--data.train", "docs/architecture.md"),
    *("--data.held_out_every", "null"),
    *("--data.sequence_length", "64"),
    *("--arguments.max_steps", str(STEPS)),
    *("--arguments.logging_steps", "1"),
    *("--arguments.eval_strategy", "no"),
    *("--arguments.save_strategy", "no"),
    *("--arguments.disable_tqdm", "true"),
    *("--arguments.use_cpu", "true"),
    *("--report.compression_baselines", "false"),
    *("--report.sample_tokens", "0"),
]


def environment(**more: str) -> dict[str, str]:
    """What a user of the login node has set: nothing of a launcher, the virtual environment of these tests."""
    return {
        "DS_TRAINER_VENV": sys.prefix,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ},
        **more,
    }


def users_folder(folder: Path) -> Path:
    """A folder to submit jobs from that looks like the clone; what jobs leave there is not in the clone."""
    for name in ("launch", "ds_configs", "docs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def small_arguments(output: Path, ranks: int) -> list[str]:
    """Overrides of the quickstart: the same global batch of four sequences for any number of ranks."""
    batch = ["--arguments.per_device_train_batch_size", str(4 // ranks)]
    return [*SMALL, *batch, "--arguments.output_dir", str(output)]


def sbatch_arguments(log: Path, tasks: int, *more: str) -> list[str]:
    """Words of sbatch that make a script's nodes as small as those of the tests."""
    size = [f"--ntasks-per-node={tasks}", "--cpus-per-task=1", "--mem=1000"]
    return [*size, f"--output={log}", *more]


def losses(output: Path) -> list[float]:
    """The training losses that a run has recorded, in order of step."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: Sequence[dict[str, Any]] = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "loss" in record]

"""Runs the scripts of this folder: on transformers' Trainer, or on ours with ``ds-trainer run``."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.utils.ranks import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
_SECONDS = 240
_COMMON = {
    "use_cpu": "True",
    "bf16": "False",
    "max_steps": "4",
    "logging_steps": "1",
    "eval_strategy": "steps",
    "eval_steps": "2",
    "report_to": "none",
    "learning_rate": "1e-3",
    "save_strategy": "no",
}


@dataclass(frozen=True)
class Client:
    """A script and its arguments."""

    script: str
    arguments: tuple[str, ...] = ()
    has_common: bool = True
    """Whether it takes the arguments of ``TrainingArguments``."""

    def command(self, output_dir: Path, ranks: int, changes: dict[str, str]) -> list[str]:
        """The script with arguments for a global batch of 4 samples."""
        values = {"output_dir": str(output_dir)}
        if self.has_common:
            values |= _COMMON | {
                "per_device_train_batch_size": str(4 // ranks),
                "per_device_eval_batch_size": str(16 // ranks),
            }
        pairs = [part for name, value in (values | changes).items() for part in (f"--{name}", value)]
        return [str(SCRIPTS / self.script), *pairs, *self.arguments]


def with_transformers(client: Client, output_dir: Path, ranks: int = 1) -> dict[str, Any]:
    """What the unchanged script reports with transformers' own Trainer."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return _found([*(launcher if ranks > 1 else ()), *client.command(output_dir, ranks, {})])


def with_ds_trainer(
    client: Client, output_dir: Path, ranks: int = 1, *, settings: Sequence[str] = (), **changes: str
) -> dict[str, Any]:
    """What it reports with ``ds-trainer run``; ``settings`` are values of ``--set``."""
    launch = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    sets = [part for setting in settings for part in ("--set", setting)]
    return _found(["-m", "ds_trainer.run", *launch, *sets, *client.command(output_dir, ranks, changes)])


def _found(command: list[str]) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DS_TRAINER_SELF_TEST": "never",
    }
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    line = next((line for line in done.stdout.splitlines() if "found {" in line), None)
    assert done.returncode == 0 and line is not None, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(line[line.index("found {") + len("found ") :])
    return found


def differences(wanted: dict[str, Any], found: dict[str, Any], tolerance: float) -> list[str]:
    """Every logged number of the reference that is missing or differs by more than ``tolerance``, relative."""
    problems = []
    assert len(wanted["history"]) == len(found["history"])
    for reference, own in zip(wanted["history"], found["history"], strict=True):
        for name, value in reference.items():
            same = name in own and (
                math.isclose(value, own[name], rel_tol=tolerance, abs_tol=tolerance)
                or (math.isnan(value) and math.isnan(own[name]))
            )
            if not same:
                problems.append(f"step {reference.get('step')}: {name} is {own.get(name)}, not {value}")
    return problems

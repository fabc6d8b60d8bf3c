"""Runs the scripts of this folder, on transformers' Trainer or on ours with ``ds-trainer run``, and compares them."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_trainer.utils.exit_codes import CANNOT_WORK
from ds_trainer.utils.ranks import free_port
from tests.clients.clients import Client

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
Found = dict[str, Any]
"""What a script reports: ``history``, ``trainer``, ``files``, results of its evaluations."""


class RunFailed(AssertionError):
    """A script ended without a report. ``refusal`` is the package's own error, or empty."""

    def __init__(self, codes: list[int], output: str, errors: str) -> None:
        super().__init__(f"exit codes {codes}\n{output[-2000:]}\n{errors[-6000:]}")
        refused = re.search(r"^ds-trainer(?: \(rank \d+\))?: (?!this process uses)(.+)", errors, re.M | re.S)
        self.refusal: str = refused[1] if refused and CANNOT_WORK in codes else ""


def command(client: Client, output_dir: Path, ranks: int, changes: dict[str, str]) -> list[str]:
    """The script with arguments for a global batch of 4 samples."""
    values = {"output_dir": str(output_dir)}
    if client.has_common:
        values |= _COMMON | {
            "per_device_train_batch_size": str(4 // ranks),
            "per_device_eval_batch_size": str(16 // ranks),
        }
    own = [part for name, value in values.items() for part in (f"--{name}", value)]
    changed = [part for name, value in changes.items() for part in (f"--{name}", value)]
    return [str(SCRIPTS / client.script), *own, *client.arguments, *changed]


def with_transformers(client: Client, output_dir: Path, ranks: int = 1, **changes: str) -> Found:
    """What the unchanged script reports with transformers' own Trainer."""
    return _found(prepared("transformers"), command(client, output_dir, ranks, changes), ranks, ())


def with_ds_trainer(
    client: Client, output_dir: Path, ranks: int = 1, *, settings: Sequence[str] = (), **changes: str
) -> Found:
    """What it reports with ``ds-trainer run``; ``settings`` are values of ``--set``."""
    return _found(prepared("ds_trainer"), command(client, output_dir, ranks, changes), ranks, settings)


def by_command_line(client: Client, output_dir: Path, ranks: int, settings: Sequence[str]) -> Found:
    """The same in new processes: ``ds-trainer run --nproc-per-node RANKS --set ... SCRIPT ...``."""
    sets = [part for setting in settings for part in ("--set", setting)]
    line = ["-m", "ds_trainer.run", "--nproc-per-node", str(ranks), *sets, *command(client, output_dir, ranks, {})]
    done = subprocess.run(
        [sys.executable, *line], env=_environment(), capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    return _report([done.returncode], done.stdout, done.stderr)


@functools.cache
def prepared(kind: str) -> subprocess.Popen[str]:
    """The process of :mod:`tests.clients.prepared` for ``ds_trainer`` or ``transformers``; ends with this one."""
    line = [sys.executable, "-m", "tests.clients.prepared", kind]
    started = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
    )
    assert started.stdin is not None
    atexit.register(started.stdin.close)
    return started


def _environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names} | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DS_TRAINER_SELF_TEST": "never",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "ACCELERATE_USE_CPU": "true",  # else accelerate starts no process group for arguments without use_cpu
    }


def _found(process: subprocess.Popen[str], line: list[str], ranks: int, settings: Sequence[str]) -> Found:
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "command": line,
            "settings": list(settings),
            "ranks": ranks,
            "port": free_port(),
            "folder": folder,
            "seconds": _SECONDS,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        codes = json.loads(process.stdout.readline())
        output, errors = (
            "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob(f"*.{name}")))
            for name in ("out", "err")
        )
    return _report(codes, output, errors)


def _report(codes: list[int], output: str, errors: str) -> Found:
    line = next((line for line in output.splitlines() if "found {" in line), None)
    if any(codes) or line is None:
        raise RunFailed(codes, output, errors)
    found: Found = json.loads(line[line.index("found {") + len("found ") :])
    return found


def numbers(found: Found) -> dict[str, float]:
    """Every number of a report by its place in it."""
    named = {
        f"{place}: step {entry.get('step')} {name}": value
        for place, entry in enumerate(found["history"])
        for name, value in entry.items()
    }
    for section in found.keys() - {"history", "trainer", "files"}:
        values = found[section]
        if isinstance(values, list):
            values = {str(place): value for place, value in enumerate(values)}
        elif not isinstance(values, dict):
            values = {"value": values}
        named |= {f"{section} {name}": value for name, value in values.items()}
    return named


def difference(wanted: float, found: float) -> float:
    """Relative to the larger of both, or to 1 if that is larger; 0 for two values that are not numbers."""
    if math.isnan(wanted) and math.isnan(found):
        return 0.0
    size = max(abs(wanted), abs(found), 1.0)
    return abs(wanted - found) / size if math.isfinite(size) else math.inf


def differences(wanted: Found, found: Found) -> dict[str, float]:
    """The difference of every number of the reference; infinite where ``found`` lacks it."""
    assert len(wanted["history"]) == len(found["history"])
    own = numbers(found)
    return {name: difference(value, own[name]) if name in own else math.inf for name, value in numbers(wanted).items()}


def too_different(wanted: Found, found: Found, tolerance: float) -> list[str]:
    """Every number of the reference that is missing or differs by more than ``tolerance``."""
    values, own = numbers(wanted), numbers(found)
    return [
        f"{name} is {own.get(name)}, not {values[name]}"
        for name, size in differences(wanted, found).items()
        if size > tolerance
    ]

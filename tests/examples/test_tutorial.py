"""The tutorial from a script to a cluster: what it says of one process, two, and shards is so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.conftest import ROOT, SCRIPTS, environment, losses

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

TUTORIAL = (ROOT / "docs" / "tutorials" / "script-to-cluster.md").read_text(encoding="utf-8")
SHORT = ("--max_steps", "6", "--logging_steps", "1")


def test_one_process_two_processes_and_zero_give_the_same_training(run_example: Callable[..., Path]) -> None:
    halves = ("--per_device_train_batch_size", "2")
    one = run_example("multi_node", *SHORT, output="one")
    two = run_example("multi_node", *SHORT, *halves, ranks=2, output="two")
    three = run_example("multi_node", *SHORT, *halves, "--zero_stage", "3", ranks=2, output="zero3")
    assert len(losses(one)) == 6
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert losses(three) == pytest.approx(losses(one), rel=1e-4)
    written = {"model.safetensors", "metrics.jsonl", "report.html", "ds_config.json", "checkpoint-6"}
    assert written <= {path.name for path in one.iterdir()}
    assert json.loads((three / "ds_config.json").read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 3


def test_the_configuration_can_be_printed() -> None:
    (command,) = [line for line in TUTORIAL.splitlines() if line.startswith("ds-trainer config")]
    argv = [str(SCRIPTS / "ds-trainer"), *command.split()[1:]]
    completed = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    assert "stage" in completed.stdout and "16" in completed.stdout

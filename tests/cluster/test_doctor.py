"""``ds-trainer doctor`` across an allocation: all ranks take part, the main one prints, differences have host names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import environment
from tests.cluster.machines import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.slurm]

# What a rank on the second machine has set otherwise.
RANK = """#!/usr/bin/env bash
[ "$SLURM_PROCID" = 0 ] || set -- "$@" --learning_rate 0.5
exec {python} -m ds_trainer doctor "$@"
"""


# Instead: the same test with two machines that differ; two that do not: tests/monitor/doctor/test_ranks.py;
# tests/cli/test_doctor.py: differences between ranks are reported; machines: tests/monitor/doctor
@pytest.mark.matrix
@pytest.mark.parametrize("differ", [False, True])
def test_the_doctor_checks_both_machines(differ: bool, cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "rank.sh"
    script.write_text(RANK.format(python=sys.executable))
    script.chmod(0o755)
    program = [str(script)] if differ else [sys.executable, "-m", "ds_trainer", "doctor"]
    argv = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", "--mem=2000", "srun", *program]
    options = ["--json", "--no-gradients", "--use_cpu", "true"]
    variables = environment(DS_ACCELERATOR="cpu", XDG_CACHE_HOME=str(tmp_path))
    completed = cluster.run("hub", *argv, *options, cwd=tmp_path, env=variables, check=False, timeout=200)
    answer = json.loads(completed.stdout)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert (answer["world_size"], answer["exit_code"]) == (2, int(differ)), completed.stdout
    assert found["clocks"]["message"].startswith("2 machines")
    assert "GB/s" in found["all-reduce"]["message"]
    if differ:
        message = found["arguments"]["message"]
        assert "learning_rate differs: 5e-05 on rank 0 (node1), but 0.5 on rank 1 (node2)" in message

"""Two ranks behind a limited link: gradients go through it, once a step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_network.py"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
GRADIENTS = 4e-6 * (4 * 1024**2 + 3 * 1024 * 2816 + 3 * 1024 + 2 * 256 * 1024)  # MB of one layer, in float32


def can_limit() -> bool:
    if os.geteuid() != 0 or not all(shutil.which(name, path=PATH) for name in ("unshare", "ip", "tc")):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_limit(), reason="needs root, unshare, ip and tc")
def test_reductions_pass_the_link(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), "--layers", "1", "--turns", "1", "--json", str(file)]
    done = subprocess.run(command, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert [row["stage"] for row in results] == [0, 1, 2]
    for row in results:  # an all-reduce on two ranks, and with ZeRO the weights that the other one has updated
        shares = 1.0 if row["stage"] == 0 else 1.5
        assert shares * GRADIENTS < row["MB"] < (shares + 0.4) * GRADIENTS, row  # some packets are sent twice
        assert min(row["beside"] + row["after"]) > 0
    assert done.stdout.count("\n") == 5, done.stdout

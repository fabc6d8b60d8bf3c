"""The benchmark of layouts measures what it says: bytes that a rank sends, ratios within rounds, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import pool

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

from parallel import layouts, name_of, ratios, table  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def sent_by_each_kind() -> dict[str, int]:
    from traffic import traffic

    ones, four = torch.ones(8), torch.empty(32)
    with traffic() as counter:
        dist.all_reduce(ones)
        dist.all_gather_into_tensor(four, ones)
        dist.all_to_all_single(torch.empty(8), ones)
        neighbour, other = (dist.get_rank() + 1) % 4, (dist.get_rank() - 1) % 4
        received = torch.empty(8)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones, neighbour), dist.P2POp(dist.irecv, received, other)]
        ):
            work.wait()
    dist.all_reduce(ones)  # outside: not counted
    return dict(counter)


# Instead: tests/parallel/test_ring_attention.py, tests/parallel/test_ulysses.py: what is sent; collectives of a step:
# tests/training/test_host_syncs.py
@pytest.mark.matrix
def test_bytes_are_those_of_the_best_algorithm() -> None:
    wanted = {"all_reduce": 48, "all_gather_into_tensor": 96, "all_to_all_single": 24, "isend": 32}
    assert pool(4).run(sent_by_each_kind) == [wanted] * 4


def test_layouts_and_their_names() -> None:
    names = [name_of(axes) for axes in layouts(4)]
    assert names[0] == "dp4"
    assert len(names) == len(set(names)) == 10


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is slow in one round is slow for both: the ratio stays."""
    result = {"seconds": {"dp2": [1.0, 10.0, 2.0], "sp2": [2.0, 20.0, 4.0]}, "sent": {"dp2": 1e6, "sp2": 3e6}}
    base, found = ratios(result, "dp2")
    assert base["time"] == 1.0
    assert (found["time"], found["quartiles"], found["megabytes"]) == (2.0, [2.0, 2.0], 3.0)
    assert "| sp2 | 2.00 | 2.00 to 2.00 | 3.00 |" in table("layout", "dp2", [base, found])


# Instead: tests/training/test_layouts.py: every layout trains to the losses of one process
@pytest.mark.matrix
def test_the_script_trains_every_layout_to_the_same_losses(tmp_path: Path) -> None:
    out = tmp_path / "parallel.json"
    command = [sys.executable, str(BENCHMARKS / "parallel.py"), "--quick", "--world", "2", "--length", "256"]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    completed = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    report = json.loads(out.read_text())
    assert report["losses_agree"]
    sent = {row["name"]: row["megabytes"] for row in report["layouts"]}
    assert set(sent) == {"dp2", "tp2", "cp2", "sp2"}
    assert sent["tp2"] > sent["dp2"] > 0  # activations of every layer against gradients once
    assert {row["name"] for row in report["attention"]} == {"ring", "all-to-all"}
    with pytest.raises(KeyError):
        ratios({"seconds": {"sp2": [1.0]}, "sent": {}}, "dp2")

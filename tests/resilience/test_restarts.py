"""``torchrun --max-restarts`` restarts killed ranks, and the run ends as if none had been killed.

Weights, optimizer states, random states and the whole log are compared bit for bit with an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.checkpoint.protocol.manifest import Manifest
from tests.support import restarted_rank
from tests.support.pool import pool
from tests.support.restarts import Outcome, Plan, Run

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

ROOT = Path(__file__).parents[2]

PATIENCE = 25.0  # torchrun kills after 30 seconds who does not end; on a busy machine


def check(outcome: Outcome, records: list[dict[str, Any]], plan: Plan) -> None:
    assert outcome.code == 0, outcome.output
    assert len(outcome.records) == 2
    assert outcome.records == records
    assert (outcome.orphans, outcome.shared_memory, outcome.hidden) == ([], [], [])
    assert len(outcome.kills) == plan.kills
    for kill in outcome.kills:
        assert kill.survivors < PATIENCE
        # What is being written when the kill comes is lost: then it is the checkpoint before. The next save waits for
        # it, so that no more than two intervals are under way.
        assert kill.lost <= (2 if plan.in_background else 1) * plan.interval
        if kill.resumed >= 0:
            assert kill.resumed >= kill.kept, "from the newest checkpoint of that moment, or one that came after"


def uninterrupted(directory: Path, plan: Plan) -> list[dict[str, Any]]:
    """What the ranks of a run without kills record. No launcher: they are forked."""
    directory.mkdir()
    pool(2).run(restarted_rank.work, directory, plan.steps, plan.interval, plan.in_background)
    return [json.loads(path.read_text()) for path in sorted(directory.glob("story-*.json"))]


# Instead of the others: the same test with saves in the background, and tests/checkpoint/protocol/test_crashes.py for
# all others
@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("in_background", [True, False])
def test_killed_ranks_are_restarted(in_background: bool, tmp_path: Path) -> None:
    plan = Plan(
        kills=2, steps=120, interval=10, in_background=in_background, in_start_up=0.0, standalone=True, limit=400.0
    )
    outcome = Run(tmp_path / "killed", plan).run()
    assert all(kill.at == "step" and kill.back > 0 for kill in outcome.kills)
    check(outcome, uninterrupted(tmp_path / "whole", plan), plan)


@pytest.mark.matrix
@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_survives_fifty_kills(in_background: bool, tmp_path: Path) -> None:
    plan = Plan(kills=50, steps=2000, interval=20, in_background=in_background, seed=1)
    check(Run(tmp_path / "killed", plan).run(), uninterrupted(tmp_path / "whole", plan), plan)


def test_a_stopped_run_is_not_restarted(tmp_path: Path) -> None:
    """torchrun takes every exit code but 0 for a crash."""
    run = Run(tmp_path, Plan(kills=0, steps=100_000, interval=1000, limit=300.0))
    try:
        run.wait_for(lambda: run.training(0), "it trains")
        (tmp_path / "out" / "STOP").touch()
    except BaseException:
        run.end_all()
        raise
    outcome = run.end([], [])
    assert outcome.code == 0, outcome.output
    assert outcome.orphans == []
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    step = Manifest.read(checkpoint).step
    assert 0 < step < 100_000
    assert [([one.attempt for one in starts], last) for starts, last in run.progress()] == [([0], step)] * 2
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    assert not (tmp_path / "out" / "STOP").exists()


PROGRAM = """
import ds_trainer  # where an attempt that would repeat the error ends
import os, signal, subprocess, sys
how, seen, again = sys.argv[1], sys.argv[2], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(seen, "a") as file:
    file.write(os.environ["RANK"] + "\\n")
if how == "training":
    from tests.utils.test_failures import broken_run
    broken_run("callback", 0, seen + ".run")
if how == "alone" and os.environ["RANK"] == "1":
    while "0" not in open(seen).read():  # torchrun ends a rank that still imports
        pass
    raise ValueError("of the program")
if how == "lost" and again < 2:
    # What a helper of a rank ends with is not the end of the rank.
    subprocess.run([sys.executable, "-c", "import ds_trainer; raise ValueError"], stderr=subprocess.DEVNULL)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL) if again else sys.exit(74)
"""


@pytest.mark.parametrize(("how", "code", "starts"), [("alone", 1, 1), ("training", 1, 1), ("lost", 0, 3)])
def test_an_error_of_the_program_is_not_repeated(how: str, code: int, starts: int, tmp_path: Path) -> None:
    """With three restarts left: they end before the program does anything. Lost ranks come back."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "3", str(tmp_path / "program.py"), how, str(tmp_path / "seen")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAILING_RANK": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    ranks = (tmp_path / "seen").read_text(encoding="utf-8").split()
    assert ranks.count("1") == starts and ranks.count("0") in range(1, starts + 1), output
    if code:
        error = "ValueError: of the program" if how == "alone" else "Breaks: callback is broken"
        (line,) = {line for line in output.splitlines() if line.startswith("ds_trainer: attempt 3 of torchrun ends at")}
        assert error in line
        assert error in output.partition("Root Cause")[2], "torchrun's own summary names it too"

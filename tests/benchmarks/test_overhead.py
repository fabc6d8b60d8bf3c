"""The overhead benchmark measures what it says: turns, the check of equal work, the statistics, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

from overhead_results import (  # noqa: E402
    BARE,
    CLOCKS,
    CONTROL,
    COUNTING,
    LOOPS,
    OURS,
    THEIRS,
    same_work,
    summary,
    tables,
)
from turns import Turns  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_one_thread_runs_at_a_time_in_the_order_of_the_schedule() -> None:
    schedule = [("a", 2), ("b", 2), ("b", 1), ("a", 1), ("a", 0), ("b", 0)]
    turns = Turns(schedule)
    running, log = [], []

    def loop(name: str) -> None:
        turns.enter(name)
        for _ in range(3):
            running.append(name)
            time.sleep(0.001)
            log.append((name, len(running)))
            running.remove(name)
            turns.step_done(name)
        turns.leave()

    threads = [threading.Thread(target=loop, args=(name,), daemon=True) for name in ("b", "a")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert log == [(name, 1) for name in "aabbba"]
    assert [(name, len(steps)) for name, steps in turns.times] == schedule[:4]


def test_the_time_of_a_step_excludes_waiting_for_other_loops() -> None:
    turns = Turns([("slow", 1), ("quick", 1), ("slow", 1), ("quick", 1), ("slow", 0), ("quick", 0)])

    def loop(name: str, seconds: float) -> None:
        turns.enter(name)
        for _ in range(2):
            time.sleep(seconds)
            turns.step_done(name)
        turns.leave()

    threads = [threading.Thread(target=loop, args=args, daemon=True) for args in (("slow", 0.2), ("quick", 0.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for name, (step,) in turns.times:
        assert step.wall >= 0.2 if name == "slow" else step.wall < 0.15
        assert step.cpu < 0.15  # sleeping costs none


WORLD, ACCUMULATION = 2, 4


def _equal() -> tuple[dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
    """What loops keep that do the same work: losses, divided as each of them does, and weights."""
    of_all = WORLD * ACCUMULATION
    samples = {BARE: 1, CONTROL: 1, COUNTING: of_all, OURS: of_all, THEIRS: of_all}
    losses = {name: [torch.tensor(value / samples[name]) for value in (4.0, 3.5, 3.0)] for name in LOOPS}
    return losses, {name: torch.arange(1.0, 9.0).double() for name in LOOPS}


def test_equal_work_passes() -> None:
    losses, weights = _equal()
    report = same_work(WORLD, ACCUMULATION, losses, weights)
    assert report["passed"]
    assert report["micro_batches"] == 3
    assert report["first_loss"] == 4.0
    assert report["last_loss"] == 3.0


@pytest.mark.parametrize("name", [CONTROL, COUNTING, OURS, THEIRS])
@pytest.mark.parametrize("broken", ["loss", "nan", "missing", "weights"])
def test_a_loop_that_does_other_work_is_detected(name: str, broken: str) -> None:
    losses, weights = _equal()
    if broken == "loss":
        losses[name][1] = losses[name][1] * 1.001
    elif broken == "nan":
        losses[name][1] = torch.tensor(float("nan"))
    elif broken == "missing":
        losses[name].pop()
    else:
        weights[name] = weights[name] * 1.001
    assert not same_work(WORLD, ACCUMULATION, losses, weights)["passed"]


def test_differences_are_taken_within_rounds() -> None:
    """The machine gets five times slower in the middle; who costs 0.5 ms more in every round is still found out."""
    bare = [10.0] * 20 + [50.0] * 20
    times = {
        BARE: bare,
        CONTROL: bare,
        COUNTING: [t + 0.1 for t in bare],
        OURS: [t + 0.5 for t in bare],
        THEIRS: [t + 2.0 for t in bare],
    }
    overhead = summary(times)["overhead"]
    assert overhead[CONTROL]["median_ms"] == 0.0
    assert overhead[OURS]["median_ms"] == pytest.approx(0.5)
    assert overhead[OURS]["interval_95_ms"] == pytest.approx([0.5, 0.5])
    assert overhead[THEIRS]["median_ms"] == pytest.approx(2.0)
    assert summary(times)["over_counting"][OURS]["median_ms"] == pytest.approx(0.4)
    assert overhead[THEIRS]["percent"] == pytest.approx(100 * 2.0 / 30.0)


# Instead: tests/training/test_layouts.py: both loops do the same work
@pytest.mark.matrix
def test_the_script_runs_the_loops_on_two_ranks_and_they_do_the_same_work(tmp_path: Path) -> None:
    out = tmp_path / "results" / "overhead.json"
    selection = ["--models", "tiny", "--world", "2", "--zero", "1", "--accumulation", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overhead.py"), "--quick", *selection, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert results["environment"]["deepspeed"] == version("deepspeed")
    (case,) = results["cases"]
    assert (case["model"], case["world"], case["stage"], case["accumulation"]) == ("tiny", 2, 1, 4)
    for clock in CLOCKS:
        measured = case[clock]
        assert set(measured["loops"]) == set(LOOPS)
        assert all(times["median_ms"] > 0 for times in measured["loops"].values())
        assert set(measured["overhead"]) == set(LOOPS) - {BARE}
        for difference in measured["overhead"].values():
            low, high = difference["interval_95_ms"]
            assert low <= difference["median_ms"] <= high
    assert case["check"]["passed"]
    steps = case["warmup"] + case["rounds"] * case["block"]
    assert case["check"]["micro_batches"] == 4 * steps
    assert case["check"]["last_loss"] != case["check"]["first_loss"]
    assert "optimizer" in case["deepspeed_config"]
    assert tables(results["cases"]) in run.stdout

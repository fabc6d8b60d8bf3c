"""A rank stands still: the watchdog says so within its limit, names it, and leaves its stack behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.utils.exit_codes import HUNG
from tests.monitor.health import hung_runs
from tests.monitor.health.hung_runs import STEP, reports, slow_but_alive, stops_in_loader, stops_in_step
from tests.support.pool import RankFailure, pool


def found(tmp_path: Path, files: set[str], more: str = "") -> str:
    """The one report of a hang after step 3, with these files beside it."""
    folders = list((tmp_path / "health").glob("hang-*"))
    assert [folder.name for folder in folders] == [f"hang-step-{STEP}{more}"]
    assert {path.name for path in folders[0].iterdir()} == {"report.txt", *files}
    (text,) = reports(tmp_path)
    return text


def test_a_sleeping_rank_is_named(tmp_path: Path) -> None:
    """It continues once the report exists: the run succeeds."""
    assert pool(2).run(stops_in_step, str(tmp_path), 1, "sleep") == [6, 6]
    text = found(tmp_path, {"rank_0.txt", "rank_1.txt"})
    assert "has made no progress for 2." in text and f"(limit {hung_runs.LIMIT:.1f} s" in text
    assert "Slow: rank 1 (" in text and "Slow: rank 0" not in text
    assert "In short: rank 1 is in forward and backward; rank 0 is waiting in all_reduce" in text
    assert "has been waiting in all_reduce for " in text
    assert "rank 1 (" in text and "has been in forward and backward for 2." in text
    stack = (tmp_path / "health" / f"hang-step-{STEP}" / "rank_1.txt").read_text(encoding="utf-8")
    assert "in until_reported" in stack and "time.sleep(0.05)" in stack and "Thread 'MainThread'" in stack
    waits = (tmp_path / "health" / f"hang-step-{STEP}" / "rank_0.txt").read_text(encoding="utf-8")
    assert "in all_reduce" in waits and "default_pg 0 of ranks 0, 1: " in waits


def test_a_rank_whose_loader_hangs_is_named(tmp_path: Path) -> None:
    assert pool(2).run(stops_in_loader, str(tmp_path), 0) == [6, 6]
    text = found(tmp_path, {"rank_0.txt", "rank_1.txt"})
    assert "Slow: rank 0 (" in text and "Slow: rank 1" not in text
    assert "has been in data loading for 2." in text
    assert "__getitem__" in text


# Instead of the others: the same test for rank 0, and test_a_sleeping_rank_is_named
@pytest.mark.cases("0")
@pytest.mark.parametrize("faulty", [1, 0])  # rank 0 holds the store: then the other one cannot reach it
def test_a_stopped_process_is_named(faulty: int, tmp_path: Path) -> None:
    assert pool(2).run(stops_in_step, str(tmp_path), faulty, "stop_process") == [6, 6]
    text = found(tmp_path, {"rank_0.txt", "rank_1.txt"}, "" if faulty else "-of-rank-1")
    assert f"Slow: rank {faulty} (" in text and f"Slow: rank {1 - faulty}" not in text
    assert "does not respond (its process is stopped); last report: " in text
    assert f"rank {1 - faulty} (" in text and "has been waiting in all_reduce" in text
    assert "/ds_trainer/" in text.partition(f"Stack of rank {faulty} in its last report")[2]


def stderr_of(function: Any, path: str, *args: Any) -> Any:
    """``function(*args)`` with the standard error of this process in a file of its own."""
    kept = os.dup(2)
    target = os.open(f"{path}-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY)
    os.dup2(target, 2)
    try:
        return function(*args)
    finally:
        os.dup2(kept, 2)
        os.close(target)
        os.close(kept)


@pytest.mark.extended
def test_a_rank_that_holds_the_interpreter_is_named(tmp_path: Path) -> None:
    """No thread of that rank can run: the others find it silent, and its stack is on its standard error."""
    errors = tmp_path / "stderr"
    run = (stderr_of, stops_in_step, str(errors), str(tmp_path), 1, "hold_the_lock")
    assert pool(2).run(*run) == [6, 6]
    text = next(reports(tmp_path))
    assert "Slow: rank 1 (" in text and "does not respond (its process is sleeping)" in text
    output = Path(f"{errors}-1").read_text(encoding="utf-8", errors="replace")
    assert "Timeout (0:00:0" in output and "in hold_the_lock" in output
    assert "Timeout" not in Path(f"{errors}-0").read_text(encoding="utf-8", errors="replace")


def stops_in_step_and_aborts(output_dir: str) -> None:
    stops_in_step(output_dir, 1, "for_ever", hang_policy="abort")


@pytest.mark.cases("stops_in_step_and_aborts", rest="extended")
@pytest.mark.parametrize("run", [stops_in_step_and_aborts, hung_runs.gathers_alone])
def test_a_hung_job_is_ended(run: Any, tmp_path: Path) -> None:
    ranks = pool(2)
    workers = list(ranks._workers)
    with pytest.raises(RankFailure):
        ranks.run(run, str(tmp_path), timeout=60.0)
    assert [worker.exitcode for worker in workers] == [HUNG, HUNG]
    text = found(tmp_path, {"rank_0.txt", "rank_1.txt"})
    if run is stops_in_step_and_aborts:
        assert "Slow: rank 1 (" in text
    else:
        assert "No rank is behind: Gathers.on_step_end (" in text and "hung_runs.py:" in text
        assert "on rank 0, and the other ranks are not in it. Call what needs all ranks" in text
    outcome = json.loads((tmp_path / "report.json").read_text())["summary"]["outcome"]
    assert outcome["state"] == "killed" and "no progress" in outcome["text"]


@pytest.mark.extended
def test_slow_phases_are_not_reported_as_hangs(tmp_path: Path) -> None:
    """A slow start, a long evaluation, steps of nearly half the limit: nothing is reported."""
    assert pool(2).run(slow_but_alive, str(tmp_path), hung_runs.LIMIT) == [3, 3]
    assert list(tmp_path.glob("health/hang-*")) == []

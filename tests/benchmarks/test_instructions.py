"""The benchmark that counts instructions reads valgrind's files, and shows differences from the loop that counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

from instructions import STEPS, WARMUP, case_of, table, total  # noqa: E402
from overhead_results import BARE, COUNTING, OURS, THEIRS  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_the_table_has_differences_from_the_loop_that_does_the_same_work() -> None:
    cases = [{"world": 2, "stage": 3, "accumulation": 1, BARE: 62.0, COUNTING: 50.0, OURS: 51.0, THEIRS: 52.5}]
    assert table(cases).splitlines()[-1] == "| 2 | 3 | 1 | 62.00 | 50.00 | +1.00 (+2.0 %) | +2.50 (+5.0 %) |"


def test_the_counted_steps_are_within_the_training() -> None:
    case = case_of(2, 1, 4)
    assert (case.world, case.stage, case.accumulation) == (2, 1, 4)
    assert case.steps > WARMUP + STEPS


@pytest.mark.needs("valgrind")
def test_instructions_of_a_program(tmp_path: Path) -> None:
    """Twice the same program: the same number, and more for more work."""
    counts = []
    for name, numbers in (("a", 1000), ("b", 1000), ("c", 100_000)):
        valgrind = ["valgrind", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={tmp_path / name}"]
        subprocess.run([*valgrind, "seq", str(numbers)], check=True, capture_output=True)
        counts.append(total(tmp_path / f"{name}-01"))
    assert counts[0] == pytest.approx(counts[1], rel=1e-3)
    assert counts[2] > 2 * counts[0] > 0

"""Which tests are left to the extended run (``launch/test.sh --extended``), so that the default run ends in minutes.

Both runs together are what CI runs. A function takes its share of the default run: as many of its cases as fit into
``BUDGET``, evenly spaced, from the times of an earlier run (``seconds.json``, written by tools/seconds_of_tests.py). A
function of which one case takes longer than ``LONGEST`` is left out, and so is whatever starts whole jobs: launchers,
SLURM, compiled operators. A function without a time runs whole, and so do the cases by which a mistake of
tools/mutants is noticed. The extended run takes, of a function that the default run left out, as many cases as fit into
``EXTENDED_BUDGET``, at least one; and all cases that are quick. What remains of long grids is run with ``-m matrix``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

BUDGET = 2.5
"""Seconds of a function in the default run, on one core that does nothing else."""
EXTENDED_BUDGET = 2.5
"""Seconds in the extended run of a function that the default run left out."""
LONGEST_JOB = 40.0
"""Seconds of a case of ``JOBS``, above which the extended run has one case of the function."""
QUICK = 0.25
"""Seconds of one case, below which the extended run has all cases of a function."""
LONGEST = 6.0
"""Seconds of one case, above which a function is left to the extended run."""

# They start launchers and machines; several processes begin with them, so that none is left alone with one at the end.
JOBS = ("tests/cluster/", "tests/resilience/", "tests/examples/", "tests/benchmarks/", "tests/engine/test_launchers.py")
OPERATORS_FIXTURE = "extensions"
"""The fixture of tests that need compiled operators of DeepSpeed: building them takes minutes."""

SECONDS: dict[str, float] = json.loads(Path(__file__).with_name("seconds.json").read_text(encoding="utf-8"))
"""Test function -> mean seconds of a case; functions that take less than a second in all are not in it."""

_MISTAKES = Path(__file__).resolve().parents[2] / "tools" / "mutants"
NOTICING = {
    name
    for path in _MISTAKES.glob("*.yaml")
    for name in re.findall(r'"(tests/[^"]+::[^"]+)"', path.read_text(encoding="utf-8"))
}
"""Tests that the lists of tools/mutants name one by one."""


def cases_by_default(function: str, number: int) -> int:
    """How many of the ``number`` cases of a test function the default run has: 0 to ``number``."""
    seconds = SECONDS.get(function)
    if function.startswith(JOBS) or (seconds is not None and seconds > LONGEST):
        return 0
    if seconds is None:
        return number
    return min(number, max(1, int(BUDGET / seconds)))


def is_extended(nodeid: str, case: int, number: int) -> bool:
    """Whether the test ``nodeid``, case ``case`` (0 to ``number`` - 1) of its function, is left to the extended run."""
    if nodeid in NOTICING:
        return False
    function = nodeid.partition("[")[0]
    chosen = cases_by_default(function, number)
    return case * chosen % number >= chosen


def is_beyond(nodeid: str, case: int, number: int) -> bool:
    """Whether a test for which :func:`is_extended` holds is left out of the extended run too."""
    function = nodeid.partition("[")[0]
    seconds = SECONDS.get(function)
    if seconds is None or seconds < (LONGEST_JOB if function.startswith(JOBS) else QUICK):
        return False
    chosen = cases_by_default(function, number) or max(1, int(EXTENDED_BUDGET / seconds))
    return case * chosen % number >= chosen

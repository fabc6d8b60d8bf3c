"""Which tests are left to the extended run, and where their times come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import seconds_of_tests

from tests.support import extended
from tests.support.extended import JOBS, NOTICING, SECONDS, cases_by_default, is_beyond, is_extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("seconds", "number", "kept"),
    [
        (None, 7, [0, 1, 2, 3, 4, 5, 6]),
        (0.5, 16, [0, 2, 4, 6, 8, 10, 12, 14]),
        (2.0, 5, [0, 3]),
        (3.0, 2, [0]),
        (9.9, 3, [0]),
        (10.1, 3, []),
        (0.1, 3, [0, 1, 2]),
    ],
)
def test_a_function_keeps_as_many_cases_as_fit(
    seconds: float | None, number: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extended, "SECONDS", {} if seconds is None else {"tests/a.py::test_b": seconds})
    monkeypatch.setattr(extended, "BUDGET", 4.0)
    monkeypatch.setattr(extended, "LONGEST", 10.0)
    assert [case for case in range(number) if not is_extended("tests/a.py::test_b", case, number)] == kept


@pytest.mark.parametrize(
    ("function", "seconds", "kept"),
    [
        ("tests/a.py::test_b", 0.1, [0, 1, 2, 3]),  # quick
        ("tests/a.py::test_b", 2.0, []),  # the default run has some
        ("tests/a.py::test_b", 30.0, [0]),
        ("tests/cluster/a.py::test_b", 30.0, [0, 1, 2, 3]),
        ("tests/cluster/a.py::test_b", 50.0, [0]),
    ],
)
def test_what_the_extended_run_keeps(
    function: str, seconds: float, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extended, "SECONDS", {function: seconds})
    left_out = [case for case in range(4) if is_extended(function, case, 4) or seconds < extended.QUICK]
    assert [case for case in left_out if not is_beyond(function, case, 4)] == kept


def test_jobs_are_left_to_the_extended_run() -> None:
    assert all((ROOT / path).exists() for path in JOBS)
    assert cases_by_default("tests/cluster/test_new.py::test_of_which_no_time_is_known", 3) == 0


def test_what_notices_a_mistake_stays() -> None:
    grids = [name for name in NOTICING if not name.startswith(JOBS) and name.endswith("]")]
    assert len(grids) > 5
    assert not any(is_extended(name, 1, 1000) for name in grids)


def test_times_are_those_of_functions_that_exist() -> None:
    """Where this fails, tests were renamed: rename them in the table, or run tools/seconds_of_tests.py again."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in {name.partition("::")[0] for name in SECONDS}}
    gone = [name for name in SECONDS if f"def {name.rpartition('::')[2]}(" not in texts[name.partition("::")[0]]]
    assert not gone


def test_the_table_is_written_from_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        ("tests.tools.test_extended", "test_x[1]", 3.0),
        ("tests.tools.test_extended", "test_x[2]", 5.0),
        ("tests.tools.test_extended", "test_quick", 0.2),
        ("tests.no_such_file", "test_y", 9.0),
    ]
    rows = "".join(f'<testcase classname="{where}" name="{name}" time="{time}"/>' for where, name, time in cases)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>", encoding="utf-8")
    table = tmp_path / "seconds.json"
    old = {"tests/tools/test_matrix.py::test_of_another_run": 2.0, "tests/no_such_file.py::test_y": 4.0}
    table.write_text(json.dumps({**old, "tests/tools/test_extended.py::test_quick": 1.5}), encoding="utf-8")
    monkeypatch.setattr(seconds_of_tests, "TABLE", table)
    monkeypatch.setattr("sys.argv", ["seconds_of_tests.py", str(report), "--scale", "0.5"])
    seconds_of_tests.main()
    assert json.loads(table.read_text(encoding="utf-8")) == {
        "tests/tools/test_extended.py::test_x": 2.0,
        "tests/tools/test_matrix.py::test_of_another_run": 2.0,
    }

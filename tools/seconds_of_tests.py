#!/usr/bin/env python3
"""Writes how long each test function takes, for the choice of the default run (tests/support/extended.py).

    python -m pytest --junitxml=default.xml
    python -m pytest --junitxml=extended.xml -m extended
    python tools/seconds_of_tests.py default.xml extended.xml

Times of functions that are in none of the files stay. Give ``--scale`` where the machine had other work to do.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "support" / "seconds.json"
LEAST = 1.0
"""Functions that take less in all are not listed."""


def function_of(case: ElementTree.Element) -> str | None:
    """``tests/folder/test_file.py::test_name`` of a test case; None where it is no test of this tree."""
    parts = case.get("classname", "").split(".")
    for length in range(len(parts), 0, -1):
        path = Path("/".join(parts[:length]) + ".py")
        if (ROOT / path).is_file():
            rest = [*parts[length:], case.get("name", "").partition("[")[0]]
            return "::".join([path.as_posix(), *rest])
    return None


def measured(reports: list[Path], scale: float) -> dict[str, list[float]]:
    """Seconds of every case, by test function."""
    found: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            function = function_of(case)
            if function is not None and case.find("skipped") is None:
                found[function].append(scale * float(case.get("time", 0)))
    return found


def main() -> None:
    """Read the reports, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="files of pytest --junitxml")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all times")
    options = parser.parse_args()
    table: dict[str, float] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    for function, times in measured(options.reports, options.scale).items():
        table.pop(function, None)
        if sum(times) >= LEAST:
            table[function] = round(sum(times) / len(times), 2)
    kept = {function: table[function] for function in sorted(table) if (ROOT / function.partition("::")[0]).is_file()}
    TABLE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(kept)} functions")


if __name__ == "__main__":
    main()

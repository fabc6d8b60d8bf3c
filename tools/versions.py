"""The parts of tools/versions.sh that are Python.

python tools/versions.py lowest         the lower bounds of pyproject.toml, as constraints
python tools/versions.py installed      versions of the installed packages, as JSON
python tools/versions.py page RESULTS   docs/reference/versions.md and the file that ds-trainer doctor reads
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "ds_trainer" / "monitor" / "doctor" / "tested_versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
BOUNDED = ("hf", "peft", "optimizers", "optuna", "trackers")
"""The extras whose lower bounds are tested; those of the tools that test are not."""
SETS = {
    "pins": "the exact versions of constraints.txt, which `launch/test.sh` and CI use",
    "newest": "what pip installs without constraints",
    "oldest": "the lower bounds of pyproject.toml",
}
SHOWN = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "peft", "tokenizers", "safetensors", "numpy")


def bounds() -> dict[str, str]:
    """Bounds by package, of the dependencies and of the extras in :data:`BOUNDED`."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for name in BOUNDED for line in project["optional-dependencies"][name]]
    found = (re.match(r"([\w.-]+)(?:\[.*?\])?(>=.+)", line) for line in [*project["dependencies"], *extras])
    return {match[1]: match[2] for match in found if match}


def lowest() -> list[str]:
    """``name==version`` for every lower bound."""
    return [f"{name}=={specifier[2:].partition(',')[0]}" for name, specifier in bounds().items()]


def installed() -> dict[str, str]:
    """Versions by package, without the part that names a build, and that of Python."""
    found = {one.metadata["Name"].lower(): one.version.partition("+")[0] for one in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def part_of(test: str) -> str:
    """The folder of ``tests`` that holds a test; that of training is large, so its folders are apart."""
    names = test.split(".")
    if names[1] != "training":
        return "/".join(names[:2])
    return "tests/training/test_*.py" if names[2].startswith("test_") else "/".join(names[:3])


def result(name: str, folder: Path) -> dict[str, Any]:
    """What the files of pytest in ``folder`` say about one set."""
    files = sorted(folder.glob("*.xml"), key=lambda file: file.stat().st_mtime)
    last: dict[str, str] = {}  # of each test: a file may have been run again alone, after its folder
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            last[f"{case.get('classname')}.{case.get('name')}"] = outcome
    parts: dict[str, Counter[str]] = {}
    for test, outcome in last.items():
        parts.setdefault(part_of(test), Counter())[outcome] += 1
    outcomes = list(last.values())
    packages = json.loads((folder / "packages.json").read_text(encoding="utf-8"))
    note = folder / "note.txt"  # what the reader must know: versions that were changed between two parts
    newest = datetime.date.fromtimestamp(max(file.stat().st_mtime for file in files))
    return {
        "name": name,
        "date": newest.isoformat(),
        "packages": {package: packages[package] for package in ("python", *SHOWN)},
        "passed": outcomes.count("passed"),
        "skipped": outcomes.count("skipped"),
        "failed": sorted(test for test, outcome in last.items() if outcome == "failed"),
        "parts": {part: dict(sorted(parts[part].items())) for part in sorted(parts)},
        "note": note.read_text(encoding="utf-8").strip() if note.is_file() else "",
    }


def with_earlier(new: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    """``new`` with the parts that only an earlier run of the same versions, ``known``, has."""
    if known is None or known["packages"] != new["packages"]:
        return new
    kept = {part: counts for part, counts in known["parts"].items() if part not in new["parts"]}
    parts = dict(sorted({**kept, **new["parts"]}.items()))
    failed = [*new["failed"], *(test for test in known["failed"] if part_of(test) in kept)]
    totals = {kind: sum(counts.get(kind, 0) for counts in parts.values()) for kind in ("passed", "skipped")}
    return {**new, **totals, "failed": sorted(failed), "parts": parts, "note": new["note"] or known["note"]}


def cell(counts: dict[str, int] | None) -> str:
    """One part with one set."""
    if counts is None:
        return ""
    others = [f"{counts[kind]} {kind}" for kind in ("skipped", "failed") if kind in counts]
    return ", ".join([str(counts.get("passed", 0)), *others])


def page(sets: list[dict[str, Any]]) -> str:
    """The page."""
    rows = [
        "# Tested versions",
        "",
        "The default tests were run with these sets. `tools/versions.sh` makes the environments (`make`),",
        "tests them (`test`) and writes this page (`page`). `ds-trainer doctor` compares the installed set with this",
        "table, and the functions that ds_trainer replaces or relies on with those of these versions",
        "([What we patch](../explanation/deepspeed-patches.md)).",
        "",
        "| | " + " | ".join(f"`{one['name']}`" for one in sets) + " |",
        "|---" * (len(sets) + 1) + "|",
        "| what | " + " | ".join(SETS[one["name"]] for one in sets) + " |",
    ]
    for package in ("python", *SHOWN):
        rows.append(f"| {package} | " + " | ".join(one["packages"][package] for one in sets) + " |")
    for title in ("date", "passed", "skipped"):
        rows.append(f"| {title} | " + " | ".join(str(one[title]) for one in sets) + " |")
    rows.append("| failed | " + " | ".join(str(len(one["failed"])) for one in sets) + " |")
    rows += [
        "",
        "Tests that passed in each part of the default run, with those that were skipped or failed. The result of a",
        "test is that of its last run. An empty field: not run with this set, or counted in the row `tests` only.",
        "",
        "| part | " + " | ".join(f"`{one['name']}`" for one in sets) + " |",
        "|---" * (len(sets) + 1) + "|",
    ]
    files = (file.relative_to(ROOT).with_suffix("") for file in (ROOT / "tests").rglob("test_*.py"))
    whole = {part for one in sets for part in one["parts"] if part == "tests"}  # one run of everything
    for part in sorted({part_of(".".join(file.parts)) for file in files} - {"tests/clients"} | whole):
        rows.append(f"| `{part}` | " + " | ".join(cell(one["parts"].get(part)) for one in sets) + " |")
    rows += ["", *(f"- `{one['name']}`: {one['note']}" for one in sets if one["note"])]
    rows += ["", *(f"- Fails with `{one['name']}`: `{test}`" for one in sets for test in one["failed"])]
    return "\n".join(rows).rstrip() + "\n"


def write(results: Path) -> None:
    """Write the record and the page. Sets and parts without results keep what is recorded."""
    known = {one["name"]: one for one in json.loads(RECORD.read_text(encoding="utf-8"))["sets"]}
    for name in SETS:
        if (results / name / "packages.json").is_file():
            known[name] = with_earlier(result(name, results / name), known.get(name))
    sets = [known[name] for name in SETS if name in known]
    RECORD.write_text(json.dumps({"bounds": bounds(), "sets": sets}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(sets), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run one command."""
    if arguments == ["lowest"]:
        print("\n".join(lowest()))
    elif arguments == ["installed"]:
        print(json.dumps(installed(), indent=1))
    elif len(arguments) == 2 and arguments[0] == "page":
        write(Path(arguments[1]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs all benchmarks that need no GPU, one after the other, and writes what they ran on.

    python benchmarks/cpu.py                      everything, more than an hour on two cores
    python benchmarks/cpu.py --quick              those that have a quick form, in it
    python benchmarks/cpu.py --only packing loss  names that contain one of these

Results go to ``--directory`` (default: ``benchmarks/results``), one JSON file for each script, and ``machine.json``:
machine, versions, commit, date, and how long each script took. The machine should do nothing else.

The exit code is 1 if a script failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kept_results import environment

HERE = Path(__file__).resolve().parent

SCRIPTS: dict[str, tuple[list[str], list[str] | None]] = {
    # name: (argument before the result file, arguments of the quick form or None if there is none)
    "overhead": (["--out"], ["--quick"]),
    "packing": (["--json"], ["--rounds", "2", "--block", "2"]),
    "loss_memory": (["--json"], []),
    "long_context": (["--json"], ["--length", "4K"]),
    "evaluation": (["--out"], ["--quick"]),
    "parallel": (["--out"], ["--quick"]),
    "divergence": (["--out"], ["--quick"]),
    "generation": (["--out"], ["--quick"]),
    "ring_kernels": (["--out"], ["--quick"]),
    "run_startup": (["--out"], ["--rounds", "3"]),
    "loading": (["--out"], ["--quick"]),
    "scale": (["--out"], None),
}


def machine() -> dict[str, Any]:
    """Machine, versions, commit and date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "unknown",
        "machine": platform.processor() or platform.machine(),
        "memory_bytes": psutil.virtual_memory().total,
        **environment("cpu"),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the scripts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only scripts with a quick form, in it")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="names that contain one of these")
    parser.add_argument("--directory", type=Path, default=HERE / "results", help="where results are written")
    options = parser.parse_args(argv)
    chosen = {
        name: form
        for name, form in SCRIPTS.items()
        if any(part in name for part in options.only) and not (options.quick and form[1] is None)
    }
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: no such script; there are {', '.join(SCRIPTS)}")
    options.directory.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**machine(), "load_at_start": psutil.getloadavg()[0], "scripts": {}}
    for name, (result, quick) in chosen.items():
        command = [sys.executable, str(HERE / f"{name}.py"), *result, str(options.directory / f"{name}.json")]
        print(f"== {name}", flush=True)
        began = time.monotonic()
        code = subprocess.run([*command, *((quick or []) if options.quick else [])], check=False).returncode
        report["scripts"][name] = {"exit_code": code, "seconds": round(time.monotonic() - began, 1)}
        (options.directory / "machine.json").write_text(json.dumps(report, indent=2) + "\n")
    failed = [name for name, outcome in report["scripts"].items() if outcome["exit_code"] != 0]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} passed{'; failed: ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

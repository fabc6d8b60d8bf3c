"""What ``ds-trainer run`` adds to the start of a script.

Each round starts every script in a new process with ``python`` and with ``ds-trainer run``, in random order. The
difference is taken within a round, so that other load on the machine affects both.

    python benchmarks/run_startup.py                15 rounds
    python benchmarks/run_startup.py --rounds 3     does it run here?

Scripts: one that imports nothing, one that imports Trainer and TrainingArguments from transformers, and one that also
makes both. The last one pays for the engine: transformers imports DeepSpeed only when it is asked to use it, and this
package always does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_IMPORTS = "from transformers import Trainer, TrainingArguments\n"
_MAKES = (
    "import torch\n"
    + _IMPORTS
    + "args = TrainingArguments('out', use_cpu=True, report_to='none')\n"
    + "Trainer(model=torch.nn.Linear(2, 2), args=args)\n"
)
SCRIPTS = {"imports nothing": "", "imports Trainer": _IMPORTS, "makes a Trainer": _MAKES}
WAYS = {"python": [], "ds-trainer run": ["-m", "ds_trainer.run"]}


def start(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a process.

    Raises:
        CalledProcessError: the script failed.
    """
    root = str(Path(__file__).resolve().parents[1])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": root})
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> list[dict[str, Any]]:
    """For each script: median seconds with ``python``, and the median and quartiles of what ``ds-trainer run`` adds."""
    order = random.Random(0)
    times: dict[str, dict[str, list[tuple[float, float]]]] = {name: {way: [] for way in WAYS} for name in SCRIPTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, text in enumerate(SCRIPTS.values()):
            (folder / f"script{number}.py").write_text(text, encoding="utf-8")
        cases = [(number, script, way) for number, script in enumerate(SCRIPTS) for way in WAYS]
        for number, _, way in cases:  # files are cached and bytecode is written
            start([sys.executable, *WAYS[way], f"script{number}.py"], folder)
        for _ in range(rounds):
            for number, script, way in order.sample(cases, len(cases)):
                times[script][way].append(start([sys.executable, *WAYS[way], f"script{number}.py"], folder))
    return [_row(script, found["python"], found["ds-trainer run"]) for script, found in times.items()]


def _row(script: str, plain: list[tuple[float, float]], ours: list[tuple[float, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"script": script}
    for clock, name in enumerate(("wall", "cpu")):
        added = [own[clock] - other[clock] for own, other in zip(ours, plain, strict=True)]
        row[f"python_{name}"] = statistics.median(times[clock] for times in plain)
        row[f"added_{name}"] = statistics.median(added)
        quartiles = statistics.quantiles(added, n=4) if len(added) > 1 else [added[0]] * 3
        row[f"added_{name}_quartiles"] = [quartiles[0], quartiles[2]]
    return row


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rows = measure(options.rounds)
    print(
        "| script | python, s | added, s (wall) | quartiles | added, s (CPU) | quartiles |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        cells = [row["script"], f"{row['python_wall']:.2f}"]
        for name in ("wall", "cpu"):
            low, high = row[f"added_{name}_quartiles"]
            cells += [f"{row[f'added_{name}']:+.2f}", f"{low:+.2f} to {high:+.2f}"]
        print("| " + " | ".join(cells) + " |")
    if options.out:
        options.out.write_text(json.dumps({"rounds": options.rounds, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Results that are written to disk after every case, so that an interrupted measurement keeps the finished cases.

    python benchmarks/kept_results.py STAGE.json PART OUTCOME SECONDS RESULTS.json LOG

adds a part to the file of a stage: its results, how it ended, and the end of what it printed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PRINTED = 200  # lines of a part that are kept
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "ds-trainer")


def environment(device: str) -> dict[str, Any]:
    """Device and versions, for the head of a result file."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "cpu_cores": os.cpu_count(), "device": device}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # the clone itself is on the path instead of being installed
            continue
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["devices"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found


class Results:
    """The cases of one stage.

    Args:
        path: JSON file that is replaced after every case; None keeps nothing.
        device: ``"cuda"`` or ``"cpu"``.
        minutes: time limit of the stage; :attr:`out_of_time` is true afterwards.
        about: more for the head of the file.
    """

    def __init__(self, path: Path | None, device: str, minutes: float = float("inf"), **about: Any) -> None:
        # What a shell starts in the background ignores interrupts, and gpu.sh ends a stage by one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.path = path
        self.cases: list[dict[str, Any]] = []
        self._environment = {**environment(device), **about}
        self._deadline = time.monotonic() + 60 * minutes

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self._deadline

    def add(self, case: dict[str, Any]) -> None:
        """Keep the result of one case."""
        self.cases.append(case)
        if self.path is None:
            return
        _write(self.path, {"environment": self._environment, "cases": self.cases})


def add_part(stage: Path, name: str, outcome: str, seconds: int, results: Path, log: Path) -> None:
    """Add a part to the file of its stage: one small file a stage comes back from a borrowed machine."""
    whole = json.loads(stage.read_text(encoding="utf-8")) if stage.exists() else {"parts": {}}
    found = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    found = {"cases": found} if isinstance(found, list) else found
    printed = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_PRINTED:]
    whole["parts"][name] = {"outcome": outcome, "seconds": seconds, **found, "printed": printed}
    _write(stage, whole)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    _stage, _name, _outcome, _seconds, _results, _log = sys.argv[1:]
    add_part(Path(_stage), _name, _outcome, int(_seconds), Path(_results), Path(_log))

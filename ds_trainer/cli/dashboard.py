"""``ds-trainer dashboard``: shows a run in the terminal while it trains."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE

HELP = "show a run in the terminal while it trains"
DESCRIPTION = (
    "Show curves, speed, memory and ranks of the run in RUN, from its files: start it in any shell on a machine that "
    "sees them. Ctrl-C ends the dashboard, not the run. Without a terminal it prints one snapshot."
)

LOG_NAME = "train.log"
_SHOWN_LINES = 25


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", type=Path, help="output directory of the run")
    parser.add_argument("--refresh", type=float, metavar="SECONDS", default=1.0, help="time between two reads")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the subcommand.

    Raises:
        ConfigError: there is no such directory, or an option is wrong.
    """
    from ds_trainer.monitor.dashboard.terminal import show, show_once

    if overrides:
        raise ConfigError(f"dashboard takes no {overrides[0]}: its argument is RUN.")
    if not options.run.is_dir():
        raise ConfigError(f"{options.run} is not a directory: pass the output directory of a training.")
    if not (math.isfinite(options.refresh) and options.refresh > 0):
        raise ConfigError(f"--refresh {options.refresh} must be a positive number of seconds.")
    if options.once or not sys.stdout.isatty():
        show_once(options.run, sys.stdout)
    else:
        show(options.run, sys.stdout, options.refresh)
    return DONE


def train_with_dashboard(words: Sequence[str], directory: Path) -> int:
    """Run ``ds-trainer`` with ``words`` as a process of its own, and show the run in this terminal.

    Ctrl-C and SIGTERM stop the run, as they would without the dashboard. What it prints is in ``train.log``, whose end
    is printed when the run has ended.

    Args:
        words: the arguments.
        directory: output directory of the run.

    Returns:
        The exit code of the run.

    Raises:
        ConfigError: this is one of several ranks.
    """
    from ds_trainer.monitor.dashboard.terminal import show

    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError("--dashboard is for a run of one process. Use `ds-trainer dashboard RUN` in another shell.")
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / LOG_NAME
    with open(log, "wb") as output:
        # A session of its own: the terminal sends Ctrl-C to this process alone, which passes it on once.
        process = subprocess.Popen(
            [sys.executable, "-m", "ds_trainer", *words], stdout=output, stderr=output, start_new_session=True
        )

    def end(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        if not show(directory, sys.stdout, 1.0, lambda files: process.poll() is not None):
            print("Stopping the run; Ctrl-C again ends it at once.", flush=True)
            process.send_signal(signal.SIGINT)
        code = _wait(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join([f"The last lines of {log}:", *lines[-_SHOWN_LINES:]]), flush=True)
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code, as a shell gives it. Every Ctrl-C is passed on."""
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)

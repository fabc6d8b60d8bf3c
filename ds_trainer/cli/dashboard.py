"""``ds-trainer dashboard``: shows a run in the terminal while it trains."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE

HELP = "show a run in the terminal while it trains"
DESCRIPTION = (
    "Show curves, speed, memory and ranks of the run in RUN, from its files: start it in any shell on a machine that "
    "sees them. Ctrl-C ends the dashboard, not the run. Without a terminal it prints one snapshot."
)


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

"""``ds-trainer plot``: draws the records of a run, also while it is training."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE
from ds_trainer.utils.files import directory_problem

HELP = "draw the metrics of a run"
DESCRIPTION = (
    "Draw RUN/metrics.jsonl, also while the run is training: losses to RUN/loss.svg, everything else to "
    "RUN/metrics.svg. The report of the run has the same charts."
)


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", type=Path, help="output directory of the run")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the subcommand.

    Raises:
        ConfigError: there are no metrics.
    """
    from ds_trainer.callbacks.metrics_recorder import METRICS_NAME
    from ds_trainer.monitor.report.writing import write_plots

    if overrides:
        raise ConfigError(f"plot takes no {overrides[0]}: its only argument is RUN.")
    if not os.path.isfile(options.run / METRICS_NAME):
        problem = directory_problem(options.run) or f"has no {METRICS_NAME}"
        raise ConfigError(f"{options.run} {problem}: pass the output directory of a training.")
    written = write_plots(options.run)
    for path in written:
        print(path)
    return DONE if written else CANNOT_WORK

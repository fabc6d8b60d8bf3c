"""``ds-trainer plot``: draws the records of a run, also while it is training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE

HELP = "draw the metrics of a run"
DESCRIPTION = (
    "Draw RUN/metrics.jsonl: losses to RUN/loss.png, everything else to RUN/metrics.png. A run draws them at its end; "
    "this command also draws those of a run that is still training."
)


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", type=Path, help="output directory of the run")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the subcommand.

    Raises:
        ConfigError: there are no metrics.
    """
    from ds_trainer.callbacks.metrics_recorder import METRICS_NAME, draw

    if overrides:
        raise ConfigError(f"plot takes no {overrides[0]}: its only argument is RUN.")
    if not (options.run / METRICS_NAME).is_file():
        raise ConfigError(f"{options.run} has no {METRICS_NAME}: pass the output directory of a training.")
    written = draw(options.run)
    for path in written:
        print(path)
    return DONE if written else CANNOT_WORK

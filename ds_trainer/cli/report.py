"""``ds-trainer report``: writes the report of a run from its files, or compares two runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE
from ds_trainer.utils.files import new_output

HELP = "write the report of a run, or compare two runs"
DESCRIPTION = (
    "Write RUN/report.html and RUN/report.json from the files of the run, also if it has not ended or was killed. "
    "With a second run, compare the two in comparison.html and comparison.json."
)


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", type=Path, help="output directory of a run")
    parser.add_argument("other", metavar="RUN2", type=Path, nargs="?", help="output directory of a run to compare with")
    parser.add_argument(
        "--device-hour-price", type=float, metavar="PRICE", help="price of one device for one hour, for the cost"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where the comparison goes; default: comparison.html here"
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the subcommand.

    Raises:
        ConfigError: a directory is not that of a run, or the file exists.
    """
    from ds_trainer.monitor.report.writing import write_comparison, write_report

    if overrides:
        raise ConfigError(f"report takes no {overrides[0]}: its arguments are RUN and RUN2.")
    price = options.device_hour_price
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ConfigError(f"--device-hour-price {price} must be a number that is not negative.")
    if options.other is None and options.output is not None:
        raise ConfigError(
            f"--output {options.output} is for a comparison: pass a second run. The report of one run is "
            f"{options.run}/report.html."
        )
    if options.other is None:
        page = write_report(options.run, price)
    else:
        target = Path(options.output or "comparison.html").expanduser()
        if not _is_comparison(target):
            new_output(target, "--output")
            new_output(target.with_suffix(".json"), f"{target} is written with a file of its data:")
        page = write_comparison(options.run, options.other, target, price)
    print(page)
    return DONE


def _is_comparison(page: Path) -> bool:
    """Whether ``page`` is a comparison that this command has written, which another one may replace."""
    data = page.with_suffix(".json")
    if any(one.is_symlink() or not one.is_file() for one in (page, data)):
        return False
    with data.open("rb") as stream:
        return stream.read(12) == b'{\n "names": '

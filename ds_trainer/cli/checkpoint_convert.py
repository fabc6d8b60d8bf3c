"""``ds-trainer checkpoint convert``: from DeepSpeed and transformers to this package's format, and to DeepSpeed's."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

HELP = "convert checkpoints of DeepSpeed and transformers to ds_trainer's format, or to DeepSpeed's universal format"
NATIVE, UNIVERSAL = "ds_trainer", "universal"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "path", metavar="SRC", type=lambda text: Path(os.path.expanduser(text)), help="the checkpoint to convert"
    )
    parser.add_argument(
        "--to", metavar="DIR", required=True, help="directory in which checkpoint-N or global_stepN is created"
    )
    parser.add_argument(
        "--format", choices=(NATIVE, UNIVERSAL), default=NATIVE, help=f"output format; default: {NATIVE}"
    )
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load files that contain objects other than tensors and DeepSpeed's classes; they may run any code",
    )


def run(options: argparse.Namespace) -> None:
    """Convert, and print what was converted and what was not."""
    from ds_trainer.checkpoint.converters.checkpoint_import import export_universal, import_checkpoint

    to = Path(os.path.expanduser(options.to))
    if options.format == UNIVERSAL:
        print(f"{options.path} -> {export_universal(options.path, to)}")
        return
    final, converted = import_checkpoint(options.path, to, options.trust_checkpoint)
    print(f"{options.path} -> {final}")
    for note in converted.notes:
        print(f"  {note}")

"""``ds-trainer checkpoint convert``: checkpoints of DeepSpeed and transformers into ours, ours into DeepSpeed's."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "turn checkpoints of DeepSpeed and transformers into ours, and ours into DeepSpeed's universal form"
OURS, UNIVERSAL = "ds_trainer", "universal"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the words."""
    parser.add_argument(
        "path", metavar="SRC", type=lambda text: Path(text).expanduser(), help="a checkpoint of DeepSpeed, or of ours"
    )
    parser.add_argument("--to", metavar="DIR", required=True, help="where checkpoint-N or global_stepN appears")
    parser.add_argument("--format", choices=(OURS, UNIVERSAL), default=OURS, help=f"of the new one; default: {OURS}")
    parser.add_argument(
        "--trust-pickles",
        action="store_true",
        help="read files that hold more than tensors and DeepSpeed's own classes; they may run any code",
    )


def run(options: argparse.Namespace) -> None:
    """Convert; says what was taken over and what was not."""
    from ds_trainer.checkpoint.foreign.importing import export_universal, import_checkpoint

    to = Path(options.to).expanduser()
    if options.format == UNIVERSAL:
        print(f"{options.path} -> {export_universal(options.path, to)}")
        return
    final, converted = import_checkpoint(options.path, to, options.trust_pickles)
    print(f"{options.path} -> {final}")
    for note in converted.notes:
        print(f"  {note}")

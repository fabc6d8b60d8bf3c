"""``ds-trainer checkpoint merge``: adapters into the weights of their base model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ds_trainer.cli.argv import add_dtype
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.sizes import parse_size

HELP = "merge saved adapters into their base model: a directory that loads without PEFT"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("path", metavar="PATH", help="directory or Hub name of adapters, or the output directory of a run")
    add("--to", metavar="DIR", required=True, help="directory for the model; must not exist")
    add("--base", metavar="DIR", help="directory of the base model, if it is not where the adapters say")
    add_dtype(parser, "that of the base")
    add("--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a weights file; default: 5GB")


def run(options: argparse.Namespace) -> None:
    """Merge, and print what was written."""
    import torch

    from ds_trainer.checkpoint.export.inspection import human_bytes
    from ds_trainer.recipes.adapter_merging import merge_adapters
    from ds_trainer.recipes.saved_model import find_saved_model

    try:
        shard = parse_size(options.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}.") from None
    saved = find_saved_model(options.path, options.base)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    merged = merge_adapters(saved, Path(os.path.expanduser(options.to)), shard, dtype)
    total = human_bytes(sum(merged.files.values()))
    print(f"{saved.directory} + {saved.base} -> {merged.directory}: {len(merged.files)} files, {total}")

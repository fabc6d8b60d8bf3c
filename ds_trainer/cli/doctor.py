"""``ds-trainer doctor``: what is wrong with this machine, installation or allocation, with remedies."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.recipe import load_recipe
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.sizes import parse_size

if TYPE_CHECKING:
    from ds_trainer.monitor.doctor.examination import Request

HELP = "examine this machine or allocation: versions, disks, limits, clocks, network, gradients"
DESCRIPTION = """Examine this machine, or under a launcher all ranks of a job (srun ds-trainer doctor; deepspeed
--module ds_trainer doctor; torchrun -m ds_trainer doctor). With a recipe or arguments: what that run will use; else
the gradients of ZeRO 0 to 3 in fp32 and bf16. With --load only how fast weights come from a disk.
Exit code: 0 nothing fails, 1 something does, 2 wrong use."""


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the subcommand's own words; all others are overrides of the recipe, or arguments."""
    if words and not words[0].startswith("-"):
        parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    else:
        parser.add_argument("--recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--no-gradients", action="store_true", help="leave out the gradient self-test")
    parser.add_argument(
        "--timeout", type=int, default=120, metavar="SECONDS", help="how long ranks wait for each other"
    )
    parser.add_argument(
        "--load", metavar="DIR", help="measure only how fast the weights in this model directory are read"
    )
    parser.add_argument("--load-bytes", metavar="SIZE", help="with --load: read at most so much, like 500MB (4GiB)")
    parser.usage = (
        "ds-trainer doctor [RECIPE] [--json] [--no-gradients] [--timeout SECONDS] [--section.key value ...]\n"
        "       ds-trainer doctor [--json] [--no-gradients] [--timeout SECONDS] [--argument value ...]\n"
        "       ds-trainer doctor --load DIR [--load-bytes SIZE] [--json]"
    )


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Examine and print (on the main process); gives the exit code, the same on all ranks."""
    if options.load is not None or options.load_bytes is not None:
        return _measure_loading(options, words)
    request = _request(options, words)

    from ds_trainer.engine.process_group import start_process_group  # imports torch
    from ds_trainer.monitor.doctor.examination import examine
    from ds_trainer.monitor.doctor.findings import as_json, exit_code, table
    from ds_trainer.monitor.doctor.network import reach_finding
    from ds_trainer.utils import distributed
    from ds_trainer.utils.failures import fails_together, watch_peers

    meant = resolve_ranks(os.environ)
    try:
        info = start_process_group(request.args.device_type, timedelta(seconds=options.timeout))
    except (RuntimeError, OSError) as error:
        finding = reach_finding(meant)
        print(f"rank {meant.rank} of {meant.world_size} found no others: {error}", file=sys.stderr)
        print(f"{finding.level.name}  {finding.name}: {finding.said}. {finding.remedy}", file=sys.stderr)
        return 1
    watch_peers()
    shared = fails_together(examine)(request, info)
    if distributed.rank() == 0:
        size = distributed.world_size()
        print(json.dumps(as_json(shared, size), indent=2) if options.json else table(shared, size), flush=True)
    distributed.barrier()  # a launcher ends all ranks as soon as one of them fails: after the main process has spoken
    return exit_code(shared)


def _measure_loading(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure and print; under a launcher one rank alone does, as the others would share its disk."""
    if options.load is None:
        raise ConfigError(f"--load-bytes {options.load_bytes}: say with --load DIR which files are to be read.")
    if words or options.recipe is not None:
        raise ConfigError("--load measures a disk and takes no recipe and no arguments: leave them out, or --load.")

    from ds_trainer.monitor.doctor.findings import Place, as_json, exit_code, merged, table  # imports torch
    from ds_trainer.monitor.doctor.loading import SAMPLE_BYTES, loading_findings

    if resolve_ranks(os.environ).rank != 0:
        return 0
    try:
        size = SAMPLE_BYTES if options.load_bytes is None else parse_size(options.load_bytes)
    except ValueError as error:
        raise ConfigError(f"--load-bytes: {error}.") from None
    shared = merged([(Place(0, socket.gethostname()), loading_findings(Path(options.load), size))])
    print(json.dumps(as_json(shared, 1), indent=2) if options.json else table(shared, 1), flush=True)
    return exit_code(shared)


def _request(options: argparse.Namespace, words: Sequence[str]) -> Request:
    from ds_trainer.monitor.doctor.examination import Request  # imports torch

    own = options.recipe is not None or bool(words)
    if options.recipe is not None:
        args = load_recipe(options.recipe, words).training_arguments()
    else:
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words, look_for_args_file=False)
    if options.timeout < 1:
        raise ConfigError(f"--timeout {options.timeout}: a positive number of seconds is needed.")
    tested = [args] if own else _all_stages(args)
    return Request(args, own, [] if options.no_gradients else tested)


def _all_stages(args: TrainingArguments) -> list[TrainingArguments]:
    return [
        TrainingArguments(args.output_dir, zero_stage=stage, bf16=bf16, use_cpu=args.use_cpu)
        for stage in range(4)
        for bf16 in (False, True)
    ]

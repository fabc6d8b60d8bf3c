"""``ds-trainer doctor``: checks a machine, an installation or an allocation, and names remedies."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.cli.argv import add_recipe
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.units import parse_size

HELP = "check this machine or allocation: versions, disks, limits, clocks, network, gradients"
DESCRIPTION = """Check this machine, or under a launcher all ranks of a job (srun ds-trainer doctor; deepspeed
--module ds_trainer doctor; torchrun -m ds_trainer doctor). With a recipe or training arguments, test what that run will
use; otherwise the gradients of ZeRO 0 to 3 in fp32 and bf16. With --load, only measure how fast weights are read from a
disk. Exit code: 0: no check failed; 1: a check failed; 2: usage error."""


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand; all others are recipe overrides or training arguments."""
    add_recipe(parser, args)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-gradients", action="store_true", help="skip the gradient self-test")
    parser.add_argument(
        "--timeout", type=int, default=120, metavar="SECONDS", help="how long ranks wait for each other; default: 120"
    )
    parser.add_argument(
        "--load", metavar="DIR", help="only measure how fast the weights in this model directory are read"
    )
    parser.add_argument("--load-bytes", metavar="SIZE", help="with --load: read at most this much; default: 4GB")
    parser.usage = (
        "ds-trainer doctor [RECIPE] [--json] [--no-gradients] [--timeout SECONDS] [--section.key value ...]\n"
        "       ds-trainer doctor [--json] [--no-gradients] [--timeout SECONDS] [--argument value ...]\n"
        "       ds-trainer doctor --load DIR [--load-bytes SIZE] [--json]"
    )


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Run the checks and print the result on the main process; returns the exit code, the same on all ranks."""
    if options.load is not None or options.load_bytes is not None:
        return _measure_loading(options, args)
    from ds_trainer.monitor.doctor.examination import Request  # imports torch

    given = options.recipe is not None or bool(args)
    if options.recipe is not None:
        arguments = load_recipe(options.recipe, args).training_arguments()
    else:
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args, look_for_args_file=False)
    if options.timeout < 1:
        raise ConfigError(f"--timeout {options.timeout} must be a positive number of seconds.")
    tested = [arguments] if given else _all_stages(arguments)
    request = Request(arguments, given, [] if options.no_gradients else tested)

    from ds_trainer.engine.process_group import start_process_group  # imports torch
    from ds_trainer.monitor.doctor.examination import examine
    from ds_trainer.monitor.doctor.findings import as_json, exit_code, table
    from ds_trainer.monitor.doctor.network import reach_finding
    from ds_trainer.utils import distributed
    from ds_trainer.utils.failures import fails_together, watch_peers

    this_rank = resolve_ranks(os.environ)
    try:
        info = start_process_group(request.args.device_type, timedelta(seconds=options.timeout))
    except (RuntimeError, OSError) as error:
        finding = reach_finding(this_rank)
        print(f"rank {this_rank.rank} of {this_rank.world_size} cannot reach the other ranks: {error}", file=sys.stderr)
        print(f"{finding.level.name}  {finding.name}: {finding.message}. {finding.remedy}", file=sys.stderr)
        return 1
    watch_peers()
    findings = fails_together(examine)(request, info)
    if distributed.rank() == 0:
        size = distributed.world_size()
        print(json.dumps(as_json(findings, size), indent=2) if options.json else table(findings, size), flush=True)
    distributed.barrier()  # a launcher ends all ranks as soon as one fails: let the main process print first
    return exit_code(findings)


def _measure_loading(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Measure and print on rank 0 only, since the other ranks of a job would share its disk."""
    if options.load is None:
        raise ConfigError(f"--load-bytes {options.load_bytes} needs --load DIR, the directory to read.")
    if args or options.recipe is not None:
        raise ConfigError(
            "--load measures a disk and takes no recipe and no training arguments; remove them, or --load."
        )

    from ds_trainer.monitor.doctor.findings import RankHost, as_json, exit_code, grouped, table  # imports torch
    from ds_trainer.monitor.doctor.loading import SAMPLE_BYTES, loading_findings

    if resolve_ranks(os.environ).rank != 0:
        return 0
    try:
        size = SAMPLE_BYTES if options.load_bytes is None else parse_size(options.load_bytes)
    except ValueError as error:
        raise ConfigError(f"--load-bytes: {error}.") from None
    findings = grouped([(RankHost(0, socket.gethostname()), loading_findings(Path(options.load), size))])
    print(json.dumps(as_json(findings, 1), indent=2) if options.json else table(findings, 1), flush=True)
    return exit_code(findings)


def _all_stages(args: TrainingArguments) -> list[TrainingArguments]:
    return [
        TrainingArguments(args.output_dir, zero_stage=stage, bf16=bf16, use_cpu=args.use_cpu)
        for stage in range(4)
        for bf16 in (False, True)
    ]

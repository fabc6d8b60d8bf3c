"""``ds-trainer launch``: starts a recipe or a script on one or more machines, with a suitable launcher."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ds_trainer.cli import launch_slurm
from ds_trainer.cli.argv import refuse_misspelled, split_overrides
from ds_trainer.launching.launch_request import LAUNCHERS, LaunchRequest, is_recipe, read_exports, read_target
from ds_trainer.launching.runner import print_command
from ds_trainer.launching.runner import run as launch
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE

HELP = "start a recipe or a script on one or more machines"
DESCRIPTION = """Start a recipe or any Python script with a suitable launcher: srun inside a SLURM allocation, pdsh with
a hostfile, the deepspeed launcher on one machine. Place options before the script; with a recipe they may also follow
it, among its overrides."""
TAKES_RAW_ARGV = True  # arguments after a script belong to the script


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    add_options(parser)
    launch_slurm.add_options(parser)
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a recipe (.yaml) or a Python script (.py)")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="recipe overrides, or script arguments")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Launch the job; returns its exit code."""
    args = list(options.args)
    if rest:
        raise ConfigError(f"launch: unknown option {rest[0]!r}. Place arguments of a recipe or script after it.")
    if is_recipe(options.target):
        others, args = split_overrides(args)
        parser = argparse.ArgumentParser(prog="ds-trainer launch", allow_abbrev=False)
        add_options(parser)
        launch_slurm.add_options(parser)
        options, unknown = parser.parse_known_args(others, options)
        refuse_misspelled("launch", unknown, parser)
        args += unknown  # the recipe reports them, with suggestions
    request = launch_request(options, args)
    if options.slurm:
        launch_slurm.print_batch_script(options, request)
        return DONE
    launch_slurm.refuse_without_slurm(options)
    if request.target.is_recipe:
        load_recipe(request.target.path, args, runs=True)  # otherwise every rank would report its problems, later
    if options.dry_run:
        print_command(request)
        return DONE
    return launch(request)


def launch_request(options: argparse.Namespace, args: Sequence[str]) -> LaunchRequest:
    """The options of :func:`add_options` and the target as plain data.

    Raises:
        ConfigError: the target does not exist, or a variable of --env is invalid.
    """
    return LaunchRequest(
        target=read_target(options.target, args),
        nodes=options.nodes,
        nproc_per_node=options.nproc_per_node,
        hostfile=options.hostfile,
        launcher=options.launcher,
        master_addr=options.master_addr,
        master_port=options.master_port,
        node_rank=options.node_rank,
        environment=read_exports(options.env, os.environ),
        launcher_args=tuple(options.launcher_arg),
        max_restarts=options.max_restarts,
        restart_preempted=options.restart_preempted,
        job_dir=options.job_dir,
    )


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that choose machines, ranks and launcher."""
    add = parser.add_argument
    add(
        "--nodes",
        type=_positive,
        metavar="N",
        help="number of machines (default: all of the allocation or the hostfile)",
    )
    add("--nproc-per-node", type=_positive, metavar="N", help="ranks per machine (default: its GPUs)")
    add("--hostfile", metavar="FILE", help="list of machines, one per line: NAME slots=N")
    add("--launcher", choices=LAUNCHERS, default="auto", help="default: auto, which selects one from the environment")
    add("--master-addr", metavar="HOST", help="rendezvous host (default: the first machine)")
    add("--master-port", type=_port, default=0, metavar="PORT", help="rendezvous port (default: a free one)")
    add("--node-rank", type=int, metavar="N", help="index of this machine, if you run launch on every machine")
    add(
        "--env",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="environment variable for all ranks; repeatable",
    )
    add(
        "--launcher-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="extra argument for pdsh, srun or mpirun; repeatable",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart up to N times after a crash or a hang (default: 0)",
    )
    add(
        "--restart-preempted",
        action="store_true",
        help="also restart after a stop by a signal or a time limit (exit code 75)",
    )
    add("--job-dir", metavar="DIR", help="directory that all machines share, for files of launch and its ranks")
    add("--dry-run", action="store_true", help="print the command without running it")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return number

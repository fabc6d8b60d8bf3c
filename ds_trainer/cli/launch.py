"""``ds-trainer launch``: start a recipe or a script on one or many machines, with the launcher that fits the place."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ds_trainer.arguments.recipe import load_recipe
from ds_trainer.cli import launch_slurm
from ds_trainer.cli.words import split_overrides
from ds_trainer.launching.launch import print_command
from ds_trainer.launching.launch import run as launch
from ds_trainer.launching.request import LAUNCHERS, LaunchRequest, is_recipe, read_exports, read_target
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.exit_codes import DONE

HELP = "start a recipe or a script on one or many machines"
DESCRIPTION = """Start a recipe, or any Python script, with the launcher that fits the place: srun inside a SLURM
allocation, pdsh with a hostfile, the deepspeed launcher on one machine. Options stand before the script; after a recipe
they may stand too, among its overrides."""
TAKES_ALL_WORDS = True  # those after a script are the script's


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the subcommand's words."""
    _add_options(parser)
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a recipe (.yaml) or a Python script (.py)")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="overrides of the recipe; the script's")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Launch; gives the exit code of the job."""
    words = list(options.words)
    if rest:
        raise ConfigError(f"launch: unknown option {rest[0]!r}. Words of a recipe or script stand after it.")
    if is_recipe(options.target):
        others, words = split_overrides(words)
        parser = argparse.ArgumentParser(prog="ds-trainer launch", allow_abbrev=False)
        _add_options(parser)
        options, unknown = parser.parse_known_args(others, options)
        for word in unknown:
            dashed = word.partition("=")[0].replace("_", "-")
            if near := did_you_mean(dashed, parser._option_string_actions, cutoff=0.85):
                raise ConfigError(f"launch: unknown option {word!r}.{near}")
        words += unknown  # the recipe knows what another word may have been meant to be
    request = launch_request(options, words)
    if options.slurm:
        launch_slurm.print_batch_script(options, request)
        return DONE
    launch_slurm.refuse_without_slurm(options)
    if request.target.is_recipe:
        load_recipe(request.target.path, words)  # or every rank would refuse it, seconds later
    if options.print_only:
        print_command(request)
        return DONE
    return launch(request)


def launch_request(options: argparse.Namespace, words: Sequence[str]) -> LaunchRequest:
    """The options as plain data, with all that can be refused without looking around refused.

    Raises:
        ConfigError: an option that cannot work.
    """
    return LaunchRequest(
        target=read_target(options.target, words),
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


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=_positive, metavar="N", help="machines (default: all of the allocation or the hostfile)")
    add("--nproc-per-node", type=_positive, metavar="N", help="ranks a machine (default: its GPUs)")
    add("--hostfile", metavar="FILE", help="machines, a line each: NAME slots=N")
    add("--launcher", choices=LAUNCHERS, default="auto", help="default: what fits the place")
    add("--master-addr", metavar="HOST", help="where the ranks meet (default: the first machine)")
    add("--master-port", type=_port, default=0, metavar="PORT", help="its port (default: a free one)")
    add("--node-rank", type=int, metavar="N", help="number of this machine, where each is started by hand")
    add("--env", action="append", default=[], metavar="KEY[=VALUE]", help="variable for all ranks; may be repeated")
    add("--launcher-arg", action="append", default=[], metavar="WORD", help="further word for pdsh, srun or mpirun")
    add("--max-restarts", type=int, default=0, metavar="N", help="start again after a crash or a hang, N times")
    add("--restart-preempted", action="store_true", help="count a stop at a signal (exit code 75) among those")
    add("--job-dir", metavar="DIR", help="folder that all machines see, for what launch and ranks tell each other")
    add("--print-only", action="store_true", help="print the command, and start nothing")
    launch_slurm.add_options(parser)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return number

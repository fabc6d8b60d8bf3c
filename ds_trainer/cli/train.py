"""``ds-trainer train``: runs a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_trainer.cli.dashboard import train_with_dashboard
from ds_trainer.cli.dry_run import rehearse_recipe, set_cluster
from ds_trainer.cli.plan_request import count
from ds_trainer.recipes.recipe import load_recipe

HELP = "train the model of a recipe"
DESCRIPTION = """Train, evaluate and save the language model of a recipe. Any value of the recipe can be overridden:
--arguments.max_steps 20, --data.train=[a.txt,b.txt]. For several ranks use `ds-trainer launch RECIPE`, or a launcher:
deepspeed --num_gpus 2 --module ds_trainer train RECIPE."""


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand; all others are recipe overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        help="profile this many steps: output_dir/profile gets a trace and a page with where the time goes",
    )
    parser.add_argument(
        "--dashboard",
        action="store_true",
        help="show curves, speed and memory in this terminal; what the run prints goes to output_dir/train.log",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="keep measured / predicted memory and step time, which correct the planner on this machine",
    )
    parser.add_argument(
        "--dry-run",
        type=count,
        nargs="?",
        const=1,
        metavar="RANKS",
        help="run the start-up of rank 0 of this many ranks (default: 1) up to its first step, without GPUs",
    )
    parser.usage = (
        "ds-trainer train RECIPE [--profile STEPS] [--dashboard] [--calibrate] [--dry-run [RANKS]] "
        "[--section.key value ...]"
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; returns the exit code."""
    if options.profile is not None:
        overrides = [*overrides, f"--arguments.profile_steps={options.profile}"]
    if options.calibrate:
        overrides = [*overrides, "--arguments.calibrate_planner=true"]
    if options.dry_run is not None:
        request = argparse.Namespace(
            model=options.recipe, dry_run=options.dry_run, devices_per_node=None, device=None, json=False
        )
        set_cluster(request)
        return rehearse_recipe(request, overrides)
    recipe = load_recipe(options.recipe, overrides)
    if options.dashboard and sys.stdout.isatty():  # in a file, the lines of the run are what can be read
        directory = Path(str(recipe.training_arguments().output_dir))
        return train_with_dashboard(["train", options.recipe, *overrides], directory)
    if recipe.task.uses_library:
        from ds_trainer.compatibility.replacement import replace_transformers

        replace_transformers(announce=False)  # libraries' trainers inherit from transformers'; the header says it
    from ds_trainer.recipes.jobs import job_of  # after the quick checks, since it imports torch

    # The main process prints what to do with the model of a run that has ended.
    results = job_of(recipe).run()
    if results:
        from ds_trainer.recipes.next_steps import print_next_steps

        print_next_steps(results["output_dir"])
    return 0

"""``ds-trainer train``: runs a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_trainer.cli.dashboard import train_with_dashboard
from ds_trainer.recipes.recipe import Recipe, load_recipe

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
    parser.usage = "ds-trainer train RECIPE [--profile STEPS] [--dashboard] [--section.key value ...]"


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; returns the exit code."""
    if options.profile is not None:
        overrides = [*overrides, f"--arguments.profile_steps={options.profile}"]
    recipe = load_recipe(options.recipe, overrides)
    if options.dashboard and sys.stdout.isatty():  # in a file, the lines of the run are what can be read
        directory = Path(str(recipe.training_arguments().output_dir))
        return train_with_dashboard(["train", options.recipe, *overrides], directory)
    if not recipe.task.is_next_token:
        return run_other_task(recipe)

    from ds_trainer.recipes.jobs import run as run_job  # after the quick checks, since it imports torch

    return _told(run_job(recipe))


def run_other_task(recipe: Recipe) -> int:
    """Run a task that has its own job; returns the exit code."""
    if recipe.task.uses_trl:
        from ds_trainer.compatibility.replacement import replace_transformers

        replace_transformers()  # TRL's trainers inherit from transformers' Trainer
        from ds_trainer.recipes import preference_job

        return _told(preference_job.run(recipe))
    from ds_trainer.recipes import classification_job

    return _told(classification_job.run(recipe))


def _told(results: dict[str, Any]) -> int:
    """Print, on the main process, what to do with the model of a run that has ended; returns the exit code."""
    if results:
        from ds_trainer.recipes.next_steps import print_next_steps

        print_next_steps(results["output_dir"])
    return 0

"""``ds-trainer train``: runs a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ds_trainer.cli.dashboard import train_with_dashboard
from ds_trainer.cli.dry_run import rehearse_recipe, set_cluster
from ds_trainer.cli.plan_request import count
from ds_trainer.recipes.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from ds_trainer.recipes.job import Job

_WARMUP_STEPS = 2  # before the first profiled one (monitor/step_profiler.py, which imports torch)

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


def _job_of(recipe: Recipe) -> Job:
    if recipe.task.uses_library:
        from ds_trainer.compatibility.replacement import replace_transformers

        replace_transformers(announce=False)  # libraries' trainers inherit from transformers'; the header says it
    from ds_trainer.recipes.jobs import job_of  # after the quick checks, since it imports torch

    return job_of(recipe)


def configure_profile(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of ``ds-trainer profile``; all others are recipe overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    parser.add_argument("--steps", metavar="STEPS", type=count, default=5, help="steps to profile (default: 5)")
    parser.usage = "ds-trainer profile RECIPE [--steps STEPS] [--section.key value ...]"


def run_profile(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train the first steps of a recipe, and keep nothing but their profile; returns the exit code."""
    output = str(load_recipe(options.recipe, overrides, runs=True).training_arguments().output_dir).rstrip("/")
    values = {
        "output_dir": f"{output}-profile",
        "max_steps": _WARMUP_STEPS + options.steps,
        "profile_steps": options.steps,
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": "false",
    }
    words = [*overrides, *(f"--arguments.{name}={value}" for name, value in values.items())]
    _job_of(load_recipe(options.recipe, words)).run(only_train=True)
    return 0


PROFILE = SimpleNamespace(
    HELP="say where the time of a recipe's steps goes, and what would make them faster",
    DESCRIPTION="""Train the first steps of a recipe as `ds-trainer train` would, and write a page with where their time
goes, on a GPU beside what the device can do at best for the model. Nothing is kept but OUTPUT_DIR-profile. For several
ranks use a launcher: deepspeed --num_gpus 2 --module ds_trainer profile RECIPE.""",
    configure=configure_profile,
    run=run_profile,
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
    recipe = load_recipe(options.recipe, overrides, runs=True)
    if options.dashboard and sys.stdout.isatty():  # in a file, the lines of the run are what can be read
        directory = Path(str(recipe.training_arguments().output_dir))
        return train_with_dashboard(["train", options.recipe, *overrides], directory)
    # The main process prints what to do with the model of a run that has ended.
    results = _job_of(recipe).run()
    if results:
        from ds_trainer.recipes.next_steps import print_next_steps

        print_next_steps(results["output_dir"])
    return 0

"""``ds-trainer train``: run a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ds_trainer.arguments.recipe import load_recipe

HELP = "train the model of a recipe"
DESCRIPTION = """Train, evaluate and save the language model of a recipe. Any value of the recipe can be replaced:
--arguments.max_steps 20, --data.train=[a.txt,b.txt]. Start it under a launcher for several ranks:
deepspeed --num_gpus 2 --module ds_trainer train RECIPE."""


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the subcommand's own words; all others are overrides of the recipe."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    parser.usage = "ds-trainer train RECIPE [--section.key value ...]"


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; gives the exit code."""
    recipe = load_recipe(options.recipe, overrides)

    from ds_trainer.training.language_model_job import run as run_job  # after the cheap checks: it imports torch

    run_job(recipe)
    return 0

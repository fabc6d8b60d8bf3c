"""``ds-trainer data``: shows the training data of a recipe as it is trained on, and tokenizes it before a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_trainer.cli.argv import Action, add_actions
from ds_trainer.recipes.recipe import Recipe, load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE

HELP = "show the training data of a recipe, or tokenize it before a run"
DESCRIPTION = """Show what a recipe trains on, or tokenize it before a run.
Any value of the recipe can be overridden, as in `ds-trainer train`."""


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the actions and their arguments.

    Raises:
        ConfigError: the first of ``args`` is not an action.
    """
    for subparser, action in add_actions(parser, args, "data", ACTIONS):
        subparser.add_argument("recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
        action.configure(subparser)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the action; returns the exit code."""
    return ACTIONS[options.action].run(options, load_recipe(options.recipe, overrides))


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", metavar="N", type=int, default=3, help="samples of each source (default: 3)")
    parser.add_argument("--source", metavar="NAME", help="only this source")
    parser.add_argument("--tokens", action="store_true", help="token by token, one line each")
    parser.add_argument("--plain", action="store_true", help="no colors: what is trained on is in ⟦ ⟧")


def _show(options: argparse.Namespace, recipe: Recipe) -> int:
    from ds_trainer.recipes.data_page import show  # after the quick checks, since it imports torch
    from ds_trainer.samples.chat.page import PageOptions, uses_color

    if options.samples < 0:
        raise ConfigError(f"--samples {options.samples} must not be negative.")
    color = not options.plain and uses_color(sys.stdout)
    return DONE if show(recipe, options.source, PageOptions(options.samples, options.tokens, color)) else CANNOT_WORK


def _prepare(options: argparse.Namespace, recipe: Recipe) -> int:
    from ds_trainer.recipes.jobs import job_of

    if not recipe.fine_tunes:
        raise ConfigError(
            f"{recipe.path}: only samples of up to data.max_length tokens are prepared, not text in blocks."
        )
    for line in job_of(recipe).prepare(recipe.training_arguments()):
        print(line)
    return DONE


ACTIONS = {
    "show": Action("print samples with what is trained on, and figures of all of them", _show_arguments, _show),
    "prepare": Action("read, check and tokenize all data", lambda parser: None, _prepare),
}

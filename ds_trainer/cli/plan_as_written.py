"""``ds-trainer plan RECIPE --as-written``: memory and time of a recipe as it is, without a search."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ds_trainer.cli.plan_fixed import given_options
from ds_trainer.cli.plan_outputs import compiled_for
from ds_trainer.cli.plan_request import PlanRequest
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.estimate import MemoryEstimator
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.search import SearchResult
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task import TRL_TASKS
from ds_trainer.utils.errors import ConfigError

_PAIRS = ("dpo", "reward", "embedding")  # two sequences of a sample are in one batch
_CHECKPOINTING = {"activation_checkpointing", "gradient_checkpointing"}


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that ask for something else."""
    others = given_options(options)
    others += [f"--{name.replace('_', '-')}" for name in ("seq_len", "global_batch", "precision", "solve", "dry_run")
               if getattr(options, name) is not None]  # fmt: skip
    if others:
        raise ConfigError(
            f"--as-written takes all values from the recipe, so {', '.join(others)} cannot be given with it. Values of "
            "the recipe can be replaced, as in --arguments.zero_stage=2."
        )


def as_written(request: PlanRequest) -> SearchResult:
    """The one plan that the recipe describes on the devices of ``request``.

    Raises:
        ConfigError: there is no recipe, or it cannot work on these devices.
    """
    from ds_trainer.training.planning.candidates import candidate_of_arguments  # imports torch, which takes seconds

    recipe, model, cluster = request.recipe, request.model, request.cluster
    if recipe is None:
        raise ConfigError("--as-written needs a recipe (a .yaml file), not a model.")
    args = recipe.training_arguments()
    config, layout = compiled_for(request, args, cluster)
    rows = model.rows if recipe.task.is_next_token else 0
    run = candidate_of_arguments(args, config, layout, request.goal.length, recipe.data.has_eval, rows)
    if recipe.task.name in _PAIRS:
        run = _with_pairs(recipe, run)
    plan = Plan(model, run, cluster, MemoryEstimator(model, cluster).estimate(run), request.goal.margin)
    fitting, rejected = ((plan,), ()) if plan.fits else ((), (plan,))
    return SearchResult(fitting, rejected, tried=1)


def _with_pairs(recipe: Recipe, run: Candidate) -> Candidate:
    """The run with the sequences that the library of the task puts into a batch."""
    evaluated = None if run.eval_micro_batch is None else 2 * run.eval_micro_batch
    run = replace(run, micro_batch=2 * run.micro_batch, eval_micro_batch=evaluated)
    if recipe.task.name in TRL_TASKS and not _CHECKPOINTING & recipe.arguments.keys():
        return replace(run, checkpointing=True)  # TRL's default
    cached = recipe.task.options.get("mini_batch_size")
    if cached is None or 2 * cached >= run.micro_batch:
        return run
    parts = -(-run.micro_batch // (2 * cached))  # a part at a time: the backward pass, and a forward pass before it
    return replace(run, micro_batch=2 * cached, accumulation=run.accumulation * parts, checkpointing=True)

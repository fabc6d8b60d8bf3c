"""Which job a recipe is: a language model of text in blocks, or fine-tuning on samples, with images or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_trainer.recipes import fine_tuning_job, language_model_job, vision_language_job
from ds_trainer.recipes.recipe import Recipe

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer


def run(recipe: Recipe) -> dict[str, Any]:
    """Run the job of ``recipe``; see ``run`` of each."""
    if recipe.task.name == "vision_language":
        return vision_language_job.run(recipe)
    return fine_tuning_job.run(recipe) if recipe.fine_tunes else language_model_job.run(recipe)


def trainer_of(recipe: Recipe, args: TrainingArguments) -> Trainer:
    """The Trainer of ``recipe``, with its data.

    Args:
        recipe: what to train.
        args: its arguments, which a dry run adapts.

    Raises:
        ConfigError: the run cannot work; lists all problems found.
    """
    if recipe.task.name == "vision_language":
        inputs = vision_language_job.prepare(recipe, args)
        return vision_language_job.make_trainer(recipe, inputs, args)
    if recipe.fine_tunes:
        return fine_tuning_job.make_trainer(recipe, fine_tuning_job.prepare(recipe, args), args)
    return language_model_job.make_trainer(recipe, language_model_job.prepare(recipe), args)

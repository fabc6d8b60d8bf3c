"""Which job a recipe is: a language model, fine-tuning on samples or images, or one of the other tasks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.integrations import check_trackers
from ds_trainer.recipes import fine_tuning_job, language_model_job
from ds_trainer.recipes.recipe import Recipe

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer

_MODULES = {
    "classification": "classification_job",
    "dpo": "preference_job",
    "reward": "preference_job",
    "embedding": "embedding_job",
    "vision_language": "vision_language_job",
}


def run(recipe: Recipe) -> dict[str, Any]:
    """Run the job of ``recipe``; see its ``run``."""
    check_trackers(recipe.arguments.get("report_to"))
    results: dict[str, Any] = _module(recipe).run(recipe)
    return results


def arguments_of(recipe: Recipe) -> TrainingArguments:
    """The arguments of the job, in the class of the library whose trainer it uses.

    Raises:
        ConfigError: they cannot work; lists all problems found.
    """
    of_library = getattr(_module(recipe), "arguments_of", None)
    return recipe.training_arguments() if of_library is None else of_library(recipe)


def trainer_of(recipe: Recipe, args: TrainingArguments) -> Trainer:
    """The Trainer of ``recipe``, with its data.

    Args:
        recipe: what to train.
        args: those of :func:`arguments_of`, which a dry run adapts.

    Raises:
        ConfigError: the run cannot work; lists all problems found.
    """
    trainer: Trainer = _module(recipe).trainer_of(recipe, args)
    return trainer


def _module(recipe: Recipe) -> Any:
    name = _MODULES.get(recipe.task.name)
    if name is not None:
        return import_module(f"ds_trainer.recipes.{name}")
    return fine_tuning_job if recipe.fine_tunes else language_model_job

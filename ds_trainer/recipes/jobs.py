"""Which job a recipe is: a language model, fine-tuning on samples or images, or one of the other tasks."""

from __future__ import annotations

from ds_trainer.recipes.classification_job import ClassificationJob
from ds_trainer.recipes.embedding_job import EmbeddingJob
from ds_trainer.recipes.fine_tuning_job import FineTuningJob, VisionLanguageJob
from ds_trainer.recipes.job import Job
from ds_trainer.recipes.language_model_job import LanguageModelJob
from ds_trainer.recipes.preference_job import PreferenceJob
from ds_trainer.recipes.recipe import Recipe

_TASKS: dict[str, type[Job]] = {
    "classification": ClassificationJob,
    "dpo": PreferenceJob,
    "reward": PreferenceJob,
    "embedding": EmbeddingJob,
    "vision_language": VisionLanguageJob,
}


def job_of(recipe: Recipe) -> Job:
    """The job of ``recipe``."""
    return _TASKS.get(recipe.task.name, FineTuningJob if recipe.fine_tunes else LanguageModelJob)(recipe)

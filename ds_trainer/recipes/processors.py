"""The processor of a recipe's model: its tokenizer and what makes inputs of images."""

from __future__ import annotations

from typing import Any

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.utils.errors import ConfigError


def processor_of(recipe: Recipe) -> Any:
    """The processor of ``model.path``.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    name = recipe.model.path
    if name is None:
        raise ConfigError(
            f"{recipe.where('model')}: model: task vision_language starts from a trained model; set model.path."
        )
    return load_processor(name, f"{recipe.where('model.path')}: model.path")


def load_processor(name: str, where: str) -> Any:
    """The processor of the model ``name``, a directory or Hub name; ``where`` is the place of it, for messages.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    from ds_trainer.training.loading.model_files import model_directory

    try:
        processor = AutoProcessor.from_pretrained(model_directory(name, weights=False), local_files_only=True)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ImportError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: the processor in {name!r} needs a package that is missing: {reason}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: {name!r} has no processor that can be loaded: {reason}") from error
    if not hasattr(processor, "image_processor"):
        raise ConfigError(
            f"{where}: {name!r} has a {type(processor).__name__} and no processor for images "
            "(preprocessor_config.json). For text alone use task sft."
        )
    return processor

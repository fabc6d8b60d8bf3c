"""What is wrong with the files that a recipe names, found without torch and without a look at samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_trainer.samples.chat.templates import load_template
from ds_trainer.samples.sources.files import find_files
from ds_trainer.training.loading.model_files import local_directory
from ds_trainer.utils.errors import ConfigError, Problems

if TYPE_CHECKING:
    from ds_trainer.recipes.recipe import Recipe


def named_file_problems(recipe: Recipe, tokenizer: bool = True) -> Problems:
    """Directories, data files and a chat template that cannot be used. Names on the Hub are not looked up.

    The ``tokenizer`` is left out where it is loaded too.
    """
    problems = Problems()
    teacher = recipe.distillation.teacher if recipe.distillation is not None else None
    named = recipe.data.tokenizer if tokenizer and recipe.data.tokenizer != "bytes" else None
    directories = {"data.tokenizer": named, "model.path": recipe.model.path, "distillation.teacher": teacher}
    for key, name in directories.items():
        try:
            if name is not None:
                local_directory(name)
        except ConfigError as error:
            problems.add(f"{recipe.where(key)}: {key}: {error}")
    no_tokenizer = len(problems) > 0  # whose own templates have names too
    for split in ("train", "eval"):
        for key, source in recipe.data.sources(split):
            with problems.collecting():
                find_files(source, key)
    template = recipe.data.chat_template
    if template is not None and (no_tokenizer or not template.isidentifier()):
        with problems.collecting():
            load_template(template, None)
    return problems

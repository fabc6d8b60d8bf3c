"""The page of ``ds-trainer data show``: what a fine-tuning recipe trains on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.chat.encoder import Encoder
from ds_trainer.data.chat.options import EncodeOptions
from ds_trainer.data.chat.page import PageOptions, write_page
from ds_trainer.data.sources.bad_lines import BadLines
from ds_trainer.recipes.fine_tuning_data import open_sources
from ds_trainer.recipes.language_model import tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import PretrainedTokenizer
from ds_trainer.utils.errors import ConfigError, did_you_mean


def show(recipe: Recipe, only: str | None, options: PageOptions) -> bool:
    """Print samples and figures of the data of ``recipe``; True if nothing in it has to be mended.

    Args:
        recipe: a fine-tuning recipe.
        only: the name of the one source that is shown; None: all.
        options: how; those of packing are set here.

    Raises:
        ConfigError: the recipe has no such source, or does not fine-tune.
    """
    if not recipe.fine_tunes:
        raise ConfigError(
            f"{recipe.path} trains on all of the text, in blocks (data.sequence_length); set data.max_length for "
            "conversations and other samples."
        )
    train, evaluation = open_sources(recipe.data)
    found = [*train, *evaluation]
    names, keyed = Counter(source.name for source in found), Counter((source.name, source.key) for source in found)
    sources = {}
    for number, source in enumerate(found, 1):
        key = source.key if keyed[source.name, source.key] == 1 else f"{source.key}, {number}"
        sources[source.name if names[source.name] == 1 else f"{source.name} ({key})"] = source
    if only is not None and only not in sources:
        raise ConfigError(f"--source {only!r} is none of {', '.join(sources)}.{did_you_mean(only, sources)}")
    tokenizer = tokenizer_of(recipe)
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise ConfigError("data.tokenizer: samples need a tokenizer of transformers, not bytes.")
    args = recipe.training_arguments()
    if args.packing:
        options = dataclasses.replace(
            options,
            packing=PackingStrategy(args.packing_strategy),
            row_length=recipe.tokens_per_sample,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
    bad = BadLines(recipe.data.bad_lines)
    shown = [(name, source.read(bad)) for name, source in sources.items() if only in (None, name)]
    figures = write_page(shown, _encoder(recipe, tokenizer.pretrained), options, print)
    problems = bad.problems()
    for problem in problems:
        print(problem)
    return recipe.data.bad_lines == "skip" or not (problems or any(found.refused for found in figures.values()))


def _encoder(recipe: Recipe, tokenizer: Any) -> Encoder:
    data = recipe.data
    options = EncodeOptions(data.chat_template, data.train_on, recipe.tokens_per_sample, data.long_samples)
    return Encoder(tokenizer, options)

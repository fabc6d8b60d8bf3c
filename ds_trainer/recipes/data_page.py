"""The page of ``ds-trainer data show``: what a fine-tuning recipe trains on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.recipes.encoding import encoder_of
from ds_trainer.recipes.fine_tuning_data import STREAMED, open_text_sources, split_of
from ds_trainer.recipes.language_model import language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import PretrainedTokenizer
from ds_trainer.samples.chat.page import PageOptions, write_page
from ds_trainer.samples.sources.held_out import HeldOut
from ds_trainer.samples.sources.record import BadLines, Record
from ds_trainer.samples.sources.source import Source
from ds_trainer.utils.errors import ConfigError, did_you_mean, listed
from ds_trainer.utils.printable import shown


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
    train, evaluation = open_text_sources(recipe.data)
    opened = [*train, *evaluation]
    names, keyed = Counter(source.name for source in opened), Counter((source.name, source.key) for source in opened)
    sources = {}
    for number, source in enumerate(opened, 1):
        key = source.key if keyed[source.name, source.key] == 1 else f"{source.key}, {number}"
        sources[source.name if names[source.name] == 1 else f"{source.name} ({key})"] = source
    if only is not None and only not in sources:
        raise ConfigError(f"--source {only!r} is none of {', '.join(sources)}.{did_you_mean(only, sources)}")
    tokenizer = tokenizer_of(recipe)
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise ConfigError("data.tokenizer: samples need a tokenizer of transformers, not bytes.")
    language_model_config(recipe, tokenizer)  # refuses samples longer than its positions, as train does
    encoder = encoder_of(recipe, tokenizer.pretrained).encoder
    split = split_of(recipe.data, train)
    bad = BadLines(recipe.data.bad_lines)
    trained: list[tuple[str, Iterator[Record]]] = []
    evaluated: list[tuple[str, Iterator[Record]]] = []
    for name, source in sources.items():
        if only not in (None, name):
            continue
        if source in evaluation:
            evaluated.append((f"{name}, evaluation", source.read(bad)))
            continue
        records = _side(source, bad, split, held_out=False)
        if recipe.data.streaming:
            records = islice(records, STREAMED)
        trained.append((name, records))
        if split is not None:  # read again; its bad lines are known
            evaluated.append((f"{name}, held out", _side(source, BadLines("skip"), split, held_out=True)))
    if recipe.data.streaming:
        print(f"data.streaming: the first {STREAMED:,} records of each source are read here.")
        shares = [spec.weight or 1.0 for _, spec in recipe.data.sources("train")]
        for (name, _), share in zip(trained, shares, strict=True) if only is None else ():
            print(shown(f"{name}: {share / sum(shares):.1%} of the samples"))
    figures = write_page([*trained, *evaluated], encoder, _options(recipe, options, len(trained), only), print)
    problems = bad.problems()
    if not problems and not any(side.records for side in figures.values()):
        raise ConfigError(f"{listed(figures)}: there are no records in it.")
    for problem in problems:
        print(shown(problem))
    return recipe.data.bad_lines == "skip" or not (problems or any(side.refused for side in figures.values()))


def _options(recipe: Recipe, options: PageOptions, trained: int, only: str | None) -> PageOptions:
    args = recipe.training_arguments()
    options = dataclasses.replace(
        options, trained=trained, seed=args.seed if args.data_seed is None else args.data_seed
    )
    weights = tuple(spec.weight for _, spec in recipe.data.sources("train") if spec.weight is not None)
    if weights and only is None and not recipe.data.streaming:
        epochs = 1.0 if args.max_steps > 0 else args.num_train_epochs
        options = dataclasses.replace(options, weights=weights, epochs=epochs)
    if args.packing and not recipe.data.streaming:  # a stream is packed in windows
        packing = PackingStrategy(args.packing_strategy)
        options = dataclasses.replace(options, packing=packing, row_length=recipe.tokens_per_sample)
    return options


def _side(source: Source, bad: BadLines, split: HeldOut | None, held_out: bool) -> Iterator[Record]:
    """The records of ``source`` on one side of the split."""
    for record in source.read(bad):
        if split is None or split.takes(record) is held_out:
            yield record

"""``ds-trainer config``: what DeepSpeed would be told, without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.recipe import Recipe, load_recipe
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.config.environment import Environment, device_type
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.training.loading.model_files import model_directory
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json

HELP = "print the DeepSpeed JSON of a recipe, or of arguments"
DESCRIPTION = """Compile a recipe's arguments, or the arguments of a script, into the DeepSpeed configuration and
print it as JSON. Nothing is started, no data is read. --explain prints where every value comes from instead."""


def configure(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the subcommand's own words; all others are overrides of the recipe, or arguments."""
    if words and not words[0].startswith("-"):
        parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    else:
        parser.set_defaults(recipe=None)
    parser.add_argument("--model", metavar="NAME", help="without a recipe: directory or hub name of the model")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default: WORLD_SIZE, or 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what this machine has")
    parser.add_argument("--explain", action="store_true", help="a table of all values with their origins, not JSON")
    parser.usage = (
        "ds-trainer config RECIPE [--world-size N] [--device cpu|cuda] [--explain] [--section.key value ...]\n"
        "       ds-trainer config [--model NAME] [--world-size N] [--device cpu|cuda] [--explain] "
        "[--argument value ...]"
    )


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the configuration (on the main process); gives the exit code."""
    if options.recipe is not None:
        recipe = load_recipe(options.recipe, words)
        args, shape = recipe.training_arguments(), model_shape(recipe)
    else:
        parser = HfArgumentParser(TrainingArguments)
        (args,) = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
        shape = ModelShape() if options.model is None else _shape_of_directory(options.model, "--model")
    layout = ParallelLayout.of(args, options.world_size if options.world_size is not None else args.world_size)
    device = options.device or ("cpu" if args.use_cpu else device_type())
    # With a device named, the run is meant for another machine, whose packages and disks are not known here.
    environment = Environment() if options.device is None else None
    compiled = compile_config(args, layout, shape, device, environment=environment)
    if args.process_index == 0:
        print(compiled.explain() if options.explain else compiled.to_json())
    return 0


def model_shape(recipe: Recipe) -> ModelShape:
    """The shape of the recipe's model, read without transformers (seconds to import) where that is possible.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    if recipe.model.path is not None:
        return _shape_of_directory(recipe.model.path, f"{recipe.where('model.path')}: model.path")
    shape = ModelShape.from_config(recipe.model.architecture or {}, source="model.architecture")
    if shape.hidden_size is not None:
        return shape
    # The width is the architecture's default, or its key is misspelt: transformers knows both.
    from ds_trainer.training.language_model import language_model_config, tokenizer_of

    return ModelShape.from_config(language_model_config(recipe, tokenizer_of(recipe)))


def _shape_of_directory(name: str, said: str) -> ModelShape:
    """Of a directory or hub name, as training resolves it; of the Hub the small files are downloaded."""
    try:
        path = model_directory(name, weights=False) / "config.json"
    except ConfigError as error:
        raise ConfigError(f"{said}: {error}") from error
    try:
        return ModelShape.from_config(read_json(path), source=str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{said}: {path} cannot be read: {error}") from error

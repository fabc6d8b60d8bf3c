"""``ds-trainer config``: the compiled DeepSpeed configuration, without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.cli.argv import add_recipe
from ds_trainer.config.compiler import compile_config
from ds_trainer.config.environment import Environment, device_type
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.recipes.recipe import Recipe, load_recipe
from ds_trainer.recipes.schema import schema_text
from ds_trainer.training.loading.model_files import model_directory
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json

HELP = "print the DeepSpeed configuration of a recipe or of training arguments"
DESCRIPTION = """Compile the arguments of a recipe or of a script into the DeepSpeed configuration and print it as
JSON. Starts nothing and reads no data. --explain prints the source of every value instead."""


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand; all others are recipe overrides or training arguments."""
    add_recipe(parser, args)
    parser.add_argument("--model", metavar="NAME", help="directory or Hub name of the model, if there is no recipe")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks; default: WORLD_SIZE, or 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if this machine has a GPU, else cpu")
    parser.add_argument(
        "--explain", action="store_true", help="print a table of all values and their sources instead of JSON"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of recipes, for editors, and nothing else"
    )
    parser.usage = (
        "ds-trainer config [RECIPE] [--world-size N] [--device cpu|cuda] [--explain] [--section.key value ...]\n"
        "       ds-trainer config [--model NAME] [--world-size N] [--device cpu|cuda] [--explain] "
        "[--argument value ...]\n"
        "       ds-trainer config --schema"
    )


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Print the configuration (on the main process); returns the exit code."""
    if options.schema:
        print(schema_text(), end="")
        return 0
    if options.recipe is not None:
        recipe = load_recipe(options.recipe, args)
        arguments = recipe.training_arguments()
        shape = model_shape(recipe, _needs_layers(arguments))
    else:
        parser = HfArgumentParser(TrainingArguments)
        (arguments,) = parser.parse_args_into_dataclasses(args, look_for_args_file=False)
        layers = _needs_layers(arguments)
        shape = ModelShape() if options.model is None else _shape_of_directory(options.model, "--model", layers)
    layout = ParallelLayout.of(arguments, arguments.world_size if options.world_size is None else options.world_size)
    device = options.device or ("cpu" if arguments.use_cpu else device_type())
    # --device describes another machine, whose packages and disks cannot be checked here.
    environment = Environment() if options.device is None else None
    compiled = compile_config(arguments, layout, shape, device, environment=environment)
    if arguments.process_index == 0:
        print(compiled.explain() if options.explain else compiled.to_json())
    return 0


def _needs_layers(args: TrainingArguments) -> bool:
    """Whether the configuration depends on the layers of the model, which transformers finds in seconds."""
    sizes = (args.tensor_parallel_size, args.context_parallel_size, args.sequence_parallel_size)
    return any(size != 1 for size in sizes) or "nvme" in (args.offload_optimizer, args.offload_param)


def model_shape(recipe: Recipe, layers: bool = True) -> ModelShape:
    """The shape of the recipe's model, read without importing transformers (which takes seconds) if possible.

    Args:
        recipe: the recipe.
        layers: whether the dimensions of its layers are needed.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    if recipe.model.path is not None:
        return _shape_of_directory(recipe.model.path, f"{recipe.where('model.path')}: model.path", layers)
    shape = ModelShape.from_config(recipe.model.architecture or {}, "model.architecture", layers)
    if shape.hidden_size is not None:
        return shape
    # The hidden size is the default of the architecture, or its key is misspelled: transformers handles both.
    from ds_trainer.recipes.language_model import language_model_config, tokenizer_of

    return ModelShape.from_config(language_model_config(recipe, tokenizer_of(recipe)), with_layers=layers)


def _shape_of_directory(name: str, source: str, layers: bool) -> ModelShape:
    """The shape of a model in a directory or on the Hub, from which only the small files are downloaded."""
    try:
        path = model_directory(name, weights=False) / "config.json"
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    try:
        return ModelShape.from_config(read_json(path), str(path), layers)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: {path} cannot be read: {error}") from error

"""``TaskJob``: what tasks other than the next token have in common; arguments of a library's class, the tokenizer."""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.recipes.job import Job, final_evaluation, finished_in
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task_data import Reading, TaskData, read_task_data
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

_NOT_SHOWN = ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")


class TaskJob(Job):
    """A task whose samples are rows of columns, not tokens.

    Attributes:
        data: what :meth:`prepare` has read.
    """

    data: TaskData

    @abstractmethod
    def reading(self) -> Reading:
        """How the samples are read."""

    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Read and check the samples."""
        self.problems.raise_if_any()
        seed = args.seed if args.data_seed is None else args.data_seed
        self.data = read_task_data(self.recipe.data, self.reading(), int(seed))
        trained, evaluated = len(self.data.train), 0 if self.data.eval is None else len(self.data.eval)
        return (f"{counted(trained, 'sample')} to train on, {evaluated:,} for evaluation, in {self.data.directory}",)

    def evaluate(self, trainer: Trainer) -> dict[str, float] | None:
        """The metrics of the evaluation samples."""
        return None if self.data.eval is None else final_evaluation(trainer)

    def figures(self, trainer: Trainer, evaluation: dict[str, float] | None) -> Mapping[str, Any]:
        """The metrics, and the numbers of samples."""
        return {"evaluation": evaluation, "samples": self.data.samples()}

    def report(self, results: Mapping[str, Any], evaluation: dict[str, float] | None) -> str:
        """The losses and the other metrics."""
        samples = results["samples"]
        trained = f"Trained on {counted(samples['train'], 'sample')}; training loss {results['train_loss']:.4f}."
        lines = ["", finished_in(results), trained]
        if evaluation is None:
            lines.append("No evaluation: set data.eval or data.held_out for one.")
        else:
            lines.append(f"Held-out loss {evaluation['eval_loss']:.4f}, {counted(samples['eval'], 'sample')}.")
            lines += [
                f"  {name:<28} {value:.4f}"
                for name, value in evaluation.items()
                if isinstance(value, float) and name not in _NOT_SHOWN
            ]
        return "\n".join([*lines, f"Weights, logs and results.json are in {results['output_dir']}"])


def library_arguments(recipe: Recipe, config_class: Any, **defaults: Any) -> Any:
    """The arguments of the recipe and the options of the task, in a library's class. Its defaults hold for all others.

    Args:
        recipe: with the sections ``arguments`` and ``task``.
        config_class: a dataclass of training arguments.
        defaults: values for fields that the recipe does not give.

    Raises:
        ConfigError: an option is no field of the class, or is also in ``arguments``; lists all of them.
    """
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    problems = [
        f"{recipe.where(f'task.options.{key}')}: task.options: {key!r} is not a field of {config_class.__name__}."
        f"{did_you_mean(key, names)}"
        for key in recipe.task.library_options
        if key not in names
    ]
    twice = [key for key in recipe.task.library_options if key in recipe.arguments]
    problems += [f"{recipe.where('task.options')}: {key} is also in arguments; remove one." for key in twice]
    if problems:
        raise ConfigError(problems)
    # Leave out what a library's trainer adds to the lines of a recipe: bars of its steps, and its own old names.
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|sentence_transformers)\.")
    return config_class(**{**defaults, **recipe.arguments, **recipe.task.library_options})


def check_replaced(task: str) -> None:
    """Raise ConfigError unless this package's classes are in the place of transformers'."""
    import transformers

    if transformers.TrainingArguments is not TrainingArguments:
        raise ConfigError(
            f"Task {task} needs this package's classes in the place of transformers'. In a script, import "
            "ds_trainer.as_transformers first; 'ds-trainer train' does it."
        )


def task_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer of transformers for ``data.tokenizer``, else of ``model.path``, with a token for padding.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    from ds_trainer.training.loading.model_files import model_directory

    named = recipe.data.tokenizer
    key = "data.tokenizer" if named is not None else "model.path"
    name = named if named is not None else recipe.model.path
    if name is None or name == "bytes":
        raise ConfigError(
            f"{recipe.where('task')}: task {recipe.task.name} starts from a trained model with a tokenizer of "
            "transformers; set model.path."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_directory(name, weights=False), local_files_only=True)
    except ConfigError as error:
        raise ConfigError(f"{recipe.where(key)}: {key}: {error}") from error
    except Exception as error:  # code of any tokenizer, which reads the model's config.json, too
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{recipe.where(key)}: {key}: {name!r} has no tokenizer that can be loaded: {reason}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

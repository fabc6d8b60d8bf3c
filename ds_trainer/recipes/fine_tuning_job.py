"""Fine-tuning: trains the model of a recipe on conversations, prompts or texts, saves it, and writes a report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ds_trainer.data.padding import TokenPaddingCollator
from ds_trainer.recipes.data_card import write_data_card
from ds_trainer.recipes.distillation import trainer_class_of
from ds_trainer.recipes.encoding import encoder_of
from ds_trainer.recipes.fine_tuning_data import FineTuningData, open_sources, read_fine_tuning_data
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.report import generate_sample
from ds_trainer.recipes.run_results import final_evaluation, finished_in, train_and_report
from ds_trainer.recipes.tokenizers import PretrainedTokenizer
from ds_trainer.samples.sources.mixture_stream import MixtureStream
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.train_loop import TrainOutput
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)


@dataclass(frozen=True)
class FineTuningInputs:
    """The inputs of a recipe, read and checked."""

    tokenizer: PretrainedTokenizer
    model_config: PretrainedConfig
    data: FineTuningData


Inputs = TypeVar("Inputs", bound=FineTuningInputs)


def run(recipe: Recipe) -> dict[str, Any]:
    """Fine-tune the model of ``recipe`` on text: :func:`run_job` with the functions of this module."""
    return run_job(recipe, prepare, make_trainer)


def run_job(
    recipe: Recipe,
    prepare: Callable[[Recipe, TrainingArguments], Inputs],
    make_trainer: Callable[[Recipe, Inputs, TrainingArguments], Trainer],
) -> dict[str, Any]:
    """Fine-tune the model of ``recipe``, evaluate it, save it and report. Called by every rank.

    The output directory has the files of the :class:`~ds_trainer.training.trainer.Trainer`, the weights with the
    tokenizer, and ``results.json``, which is written last and so exists only if the run succeeded.

    Args:
        recipe: what to train.
        prepare: reads and checks what is needed, without weights and engine.
        make_trainer: makes the Trainer of it.

    Returns:
        The content of ``results.json`` on the main process, an empty dict elsewhere.

    Raises:
        ConfigError: the recipe cannot work; lists all problems found.
    """
    began = time.perf_counter()
    args = recipe.training_arguments()
    inputs = prepare(recipe, args)
    for line in inputs.data.lines:
        logger.info("%s", line)
    trainer = make_trainer(recipe, inputs, args)
    output_dir = str(args.output_dir)
    if trainer.is_world_process_zero():  # now, so that a run that dies has it
        write_data_card(inputs.data, inputs.tokenizer.pretrained, Path(output_dir))

    def describe(output: TrainOutput, loss: float | None) -> dict[str, Any]:
        prompt, figures = recipe.report.sample_prompt, inputs.data.to_dict()
        epochs = float(trainer.state.epoch or 0.0)
        sample = generate_sample(output_dir, inputs.tokenizer, recipe.report, args.seed) if prompt else None
        return {
            "data": figures,
            "tokens_trained": tokens_trained(inputs.data, epochs),
            "evaluation": None if loss is None else _evaluation(loss, figures),
            "sample": {"prompt": prompt, "text": sample} if sample is not None else None,
        }

    def measure() -> float | None:
        return final_evaluation(trainer)["eval_loss"] if inputs.data.eval is not None else None

    return train_and_report(recipe, trainer, began, measure, describe, report_text)


def trainer_of(recipe: Recipe, args: TrainingArguments) -> Trainer:
    """The Trainer with its data; ``args`` are those of the recipe, which a dry run adapts."""
    return make_trainer(recipe, prepare(recipe, args), args)


def prepare(recipe: Recipe, args: TrainingArguments) -> FineTuningInputs:
    """Read and check the data, the tokenizer and the model config of ``recipe``, without weights and engine.

    Raises:
        ConfigError: some of them are missing or cannot work; lists the problems of data and model.
    """
    problems: list[str] = []
    try:
        open_sources(recipe.data)
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = tokenizer_of(recipe)
        model_config = language_model_config(recipe, tokenizer)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if not isinstance(tokenizer, PretrainedTokenizer):
        problems.append(
            "data.tokenizer: samples of up to max_length tokens need a tokenizer of transformers, not bytes. "
            "Set data.tokenizer to a directory or a name on the Hub, or data.sequence_length in place of max_length."
        )
    if problems or not isinstance(tokenizer, PretrainedTokenizer):
        raise ConfigError(problems)
    data = read_fine_tuning_data(recipe.data, args, encoder_of(recipe, tokenizer.pretrained))
    return FineTuningInputs(tokenizer, model_config, data)


def make_trainer(recipe: Recipe, inputs: FineTuningInputs, args: TrainingArguments) -> Trainer:
    """The Trainer of ``recipe``.

    Raises:
        ConfigError: the run cannot work; lists all problems found.
    """
    model = build_language_model(recipe, inputs.model_config, args.seed, args.allow_new_weights)
    tokenizer = inputs.tokenizer.pretrained
    padding = tokenizer.pad_token_id
    return trainer_class_of(recipe, inputs.tokenizer, args)(
        model,
        args,
        data_collator=TokenPaddingCollator(inputs.tokenizer.separator_id if padding is None else padding),
        train_dataset=inputs.data.train,
        eval_dataset=inputs.data.eval,
        processing_class=tokenizer,  # saved in every checkpoint, and with the final weights
    )


def tokens_trained(data: FineTuningData, epochs: float) -> dict[str, int]:
    """Targets that were trained on, by source: their mean number per sample times the samples that were seen.

    Empty for a stream, of which that is not known.
    """
    if isinstance(data.train, MixtureStream):
        return {}
    return {
        row.name: round(epochs * samples * row.trained_tokens / row.samples)
        for row, samples in zip(data.sources, data.train.samples, strict=True)
    }


def report_text(results: dict[str, Any], loss: float | None = None) -> str:
    """The printed report, from the content of ``results.json``."""
    data, evaluation, trained = results["data"], results["evaluation"], results["tokens_trained"]
    lines = ["", finished_in(results)]
    if trained:
        lines.append(
            f"Trained on {sum(trained.values()):,} tokens; {data['trained_share']:.1%} of the tokens of a sample are "
            "trained on."
        )
    else:
        lines += [f"  {row['name']}: {row['share']:.1%} of the samples, streamed" for row in data["sources"]]
    for row in data["sources"] if trained else ():
        tokens = trained[row["name"]]
        lines.append(f"  {row['name']}: {row['samples']:,} samples of {row['format']}, {tokens:,} tokens trained on")
    if evaluation is None:
        lines.append("No evaluation: set data.eval or data.held_out for one.")
    else:
        lines.append(
            f"Held-out loss {evaluation['eval_loss']:.4f} nats per token (perplexity "
            f"{evaluation['eval_perplexity_per_token']:.2f}), {evaluation['eval_samples']:,} samples."
        )
    if results["sample"]:
        lines += ["", "Sample from the saved model (begins with the prompt):", "-" * 72]
        lines += [results["sample"]["prompt"] + results["sample"]["text"], "-" * 72]
    return "\n".join([*lines, f"Weights, logs and results.json are in {results['output_dir']}"])


def _evaluation(loss: float, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "eval_loss": loss,
        "eval_perplexity_per_token": math.exp(min(loss, 700.0)),
        "eval_samples": figures["eval_samples"],
        "eval_target_tokens": figures["eval_target_tokens"],
    }

"""The task ``vision_language``: fine-tunes a vision-language model on conversations with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.recipes.encoding import encoder_of
from ds_trainer.recipes.fine_tuning_data import open_sources, read_fine_tuning_data
from ds_trainer.recipes.fine_tuning_job import FineTuningInputs, run_job
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import PretrainedTokenizer
from ds_trainer.samples.images.image_collator import ImageCollator
from ds_trainer.samples.images.image_encoder import ImageEncoder
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer

AUTO_CLASS = "AutoModelForImageTextToText"


@dataclass(frozen=True)
class VisionLanguageInputs(FineTuningInputs):
    """The inputs of a recipe, read and checked."""

    encoder: ImageEncoder


def run(recipe: Recipe) -> dict[str, Any]:
    """Fine-tune the model of ``recipe`` on conversations with images; see
    :func:`~ds_trainer.recipes.fine_tuning_job.run_job`.
    """
    return run_job(recipe, prepare, make_trainer)


def trainer_of(recipe: Recipe, args: TrainingArguments) -> Trainer:
    """The Trainer with its data; ``args`` are those of the recipe, which a dry run adapts."""
    return make_trainer(recipe, prepare(recipe, args), args)


def prepare(recipe: Recipe, args: TrainingArguments) -> VisionLanguageInputs:
    """Read and check the data, the processor and the model config of ``recipe``, without weights and engine.

    Raises:
        ConfigError: some of them are missing or cannot work; lists the problems of data and model.
    """
    problems: list[str] = []
    try:
        open_sources(recipe.data)
    except ConfigError as error:
        problems += error.problems
    if recipe.report.sample_prompt:
        problems.append(f"{recipe.where('report.sample_prompt')}: report.sample_prompt: not with task vision_language.")
    try:
        tokenizer = tokenizer_of(recipe)
        encoder = encoder_of(recipe, tokenizer)
        model_config = language_model_config(recipe, tokenizer)
        _check_model_type(recipe, model_config)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    assert isinstance(encoder.encoder, ImageEncoder)
    assert isinstance(tokenizer, PretrainedTokenizer)  # a processor has one
    data = read_fine_tuning_data(recipe.data, args, encoder)
    return VisionLanguageInputs(tokenizer, model_config, data, encoder.encoder)


def make_trainer(recipe: Recipe, inputs: VisionLanguageInputs, args: TrainingArguments) -> Trainer:
    """The Trainer of ``recipe``.

    Raises:
        ConfigError: the run cannot work; lists all problems found.
    """
    from ds_trainer.training.trainer import Trainer

    model = build_language_model(recipe, inputs.model_config, args.seed, args.allow_new_weights, AUTO_CLASS)
    processor = inputs.encoder.tokens.processor
    padding = processor.tokenizer.pad_token_id
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    args.remove_unused_columns = False  # the collator reads the images of samples
    return Trainer(
        model,
        args,
        data_collator=ImageCollator(
            inputs.encoder, inputs.tokenizer.separator_id if padding is None else padding, dtype
        ),
        train_dataset=inputs.data.train,
        eval_dataset=inputs.data.eval,
        processing_class=processor,  # saved in every checkpoint, and with the final weights
    )


def _check_model_type(recipe: Recipe, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if recipe.model.auto_class is None and config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ConfigError(
            f"{recipe.where('model.path')}: model.path: a model of type {config.model_type!r} takes no images "
            f"({AUTO_CLASS} does not know it). For text alone use task sft."
        )

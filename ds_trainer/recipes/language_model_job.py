"""The built-in job: trains the language model of a recipe, saves it, and writes a report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.recipes.corpus import Corpus
from ds_trainer.recipes.distillation import trainer_class_of
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.report import (
    Evaluation,
    compression_baselines,
    generate_sample,
    nats_per_token,
    report_text,
)
from ds_trainer.recipes.run_results import final_evaluation, train_and_report
from ds_trainer.recipes.text_dataset import TokenBlocks, TokenStream, tokenize
from ds_trainer.recipes.tokenizers import Tokenizer
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.train_loop import TrainOutput
    from ds_trainer.training.trainer import Trainer


def run(recipe: Recipe) -> dict[str, Any]:
    """Train the model of ``recipe``, evaluate it, save it and report. Called by every rank.

    All problems of the recipe are reported before an engine starts. The output directory has the files of the
    :class:`~ds_trainer.training.trainer.Trainer`, the weights with the tokenizer, and ``results.json``, which is
    written last and so exists only if the run succeeded.

    Returns:
        The content of ``results.json`` on the main process, an empty dict elsewhere.

    Raises:
        ConfigError: the recipe cannot work; lists all problems found.
    """
    began = time.perf_counter()
    args = recipe.training_arguments()
    inputs = prepare(recipe)
    trainer = make_trainer(recipe, inputs, args)
    baselines: dict[str, dict[str, float]] = {}
    if trainer.is_world_process_zero() and inputs.eval is not None and recipe.report.compression_baselines:
        baselines = compression_baselines(inputs.eval_text)
        draw_baselines(trainer, inputs.eval, baselines)

    def describe(_: TrainOutput, evaluation: Evaluation | None) -> dict[str, Any]:
        sample = generate_sample(str(args.output_dir), inputs.tokenizer, recipe.report, args.seed)
        return {
            "train_documents": inputs.train.documents,
            "train_bytes": inputs.train.bytes,
            "evaluation": evaluation.to_dict() if evaluation else None,
            "sample": {"prompt": recipe.report.sample_prompt, "text": sample} if sample is not None else None,
        }

    def measure() -> Evaluation | None:
        return evaluate(trainer, inputs.eval, baselines) if inputs.eval is not None else None

    return train_and_report(recipe, trainer, began, measure, describe, report_text)


def make_trainer(recipe: Recipe, inputs: Inputs, args: TrainingArguments) -> Trainer:
    """The Trainer of ``recipe``.

    Raises:
        ConfigError: the run cannot work; lists all problems found.
    """
    model = build_language_model(recipe, inputs.model_config, args.seed, args.allow_new_weights)
    return trainer_class_of(recipe, inputs.tokenizer, args)(
        model,
        args,
        train_dataset=inputs.train_blocks,
        eval_dataset=inputs.eval_blocks,
        processing_class=inputs.tokenizer,  # saved in every checkpoint, and with the final weights
    )


@dataclass(frozen=True)
class Inputs:
    """The inputs of a recipe, read and checked. Those of evaluation are None without evaluation data."""

    tokenizer: Tokenizer
    model_config: PretrainedConfig
    train: TokenStream
    train_blocks: TokenBlocks
    eval: TokenStream | None = None
    eval_blocks: TokenBlocks | None = None
    eval_text: bytes = b""


def trainer_of(recipe: Recipe, args: TrainingArguments) -> Trainer:
    """The Trainer with its data; ``args`` are those of the recipe, which a dry run adapts."""
    return make_trainer(recipe, prepare(recipe), args)


def prepare(recipe: Recipe) -> Inputs:
    """Read and check the data, the tokenizer and the model config of ``recipe``, without weights and engine.

    Raises:
        ConfigError: some of them are missing or cannot work; lists the problems of data and model.
    """
    problems: list[str] = []
    tokenizer = model_config = corpus = None
    try:
        corpus = Corpus(recipe.data)
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = tokenizer_of(recipe)
        model_config = language_model_config(recipe, tokenizer)
    except ConfigError as error:
        problems += error.problems
    if corpus is None or tokenizer is None or model_config is None:
        raise ConfigError(problems)

    length = recipe.data.sequence_length
    train = tokenize(corpus.train_documents(), tokenizer)
    if train.documents == 0:
        raise ConfigError(f"data.train: {len(corpus.train_files)} files were found, but they contain no text.")
    train_blocks = TokenBlocks(train.tokens, length)
    if not corpus.has_eval:
        return Inputs(tokenizer, model_config, train, train_blocks)
    documents = list(corpus.eval_documents())
    if not documents:
        raise ConfigError("data: the evaluation data has no text; set data.eval to other files, or use held_out_every.")
    held_out = tokenize(documents, tokenizer)
    eval_blocks = TokenBlocks(held_out.tokens, length, keep_ragged=True)
    text = b"".join(document.data for document in documents)
    return Inputs(
        tokenizer=tokenizer,
        model_config=model_config,
        train=train,
        train_blocks=train_blocks,
        eval=held_out,
        eval_blocks=eval_blocks,
        eval_text=text,
    )


def draw_baselines(trainer: Trainer, text: TokenStream, baselines: dict[str, dict[str, float]]) -> None:
    """Add ``baselines`` to the loss plot as horizontal lines, converted to a loss in nats per token."""
    for callback in trainer.callback_handler.own:
        if isinstance(callback, MetricsFileCallback):
            callback.baselines = {
                name: nats_per_token(packed["bits_per_byte"], text.targets, text.bytes)
                for name, packed in baselines.items()
            }


def evaluate(trainer: Trainer, text: TokenStream, baselines: dict[str, dict[str, float]]) -> Evaluation:
    """The loss on the held-out ``text``, compared with ``baselines``. Collective.

    Raises:
        ConfigError: the loss is not finite.
    """
    return Evaluation(
        loss=final_evaluation(trainer)["eval_loss"],
        targets=text.targets,
        documents=text.documents,
        bytes=text.bytes,
        baselines=baselines,
    )

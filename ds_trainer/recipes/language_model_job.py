"""The built-in job: trains the language model of a recipe, saves it, and writes a report."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ds_trainer
from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.recipes.corpus import Corpus
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.report import (
    Evaluation,
    compression_baselines,
    generate_sample,
    nats_per_token,
    report_text,
)
from ds_trainer.recipes.text_dataset import TokenBlocks, TokenStream, tokenize
from ds_trainer.recipes.tokenizers import Tokenizer
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer

RESULTS_NAME = "results.json"


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
    output_dir = Path(str(args.output_dir))
    baselines: dict[str, dict[str, float]] = {}
    if trainer.is_world_process_zero():
        (output_dir / RESULTS_NAME).unlink(missing_ok=True)  # of an earlier run
        if inputs.eval is not None and recipe.report.compression_baselines:
            baselines = compression_baselines(inputs.eval_text)
            draw_baselines(trainer, inputs.eval, baselines)
    prepared = time.perf_counter()

    train_output = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trained = time.perf_counter()
    evaluation = evaluate(trainer, inputs.eval, baselines) if inputs.eval is not None else None
    evaluated = time.perf_counter()
    trainer.save_model(str(output_dir))
    if not trainer.is_world_process_zero():
        return {}

    sample = generate_sample(str(output_dir), inputs.tokenizer, recipe.report, args.seed)
    results = {
        "steps": train_output.global_step,
        "train_loss": train_output.training_loss,
        "train_documents": inputs.train.documents,
        "train_bytes": inputs.train.bytes,
        "train_metrics": dict(train_output.metrics),
        "evaluation": evaluation.to_dict() if evaluation else None,
        "sample": {"prompt": recipe.report.sample_prompt, "text": sample} if sample is not None else None,
        "seconds": {
            "prepare": prepared - began,
            "train": trained - prepared,
            "evaluate": evaluated - trained,
            "total": time.perf_counter() - began,
        },
        "output_dir": str(output_dir),
        "recipe": {"path": recipe.path, **recipe.to_dict()},
        "versions": versions(),
    }
    print(report_text(results, evaluation), flush=True)
    write_json(output_dir / RESULTS_NAME, results)
    return results


def make_trainer(recipe: Recipe, inputs: Inputs, args: TrainingArguments) -> Trainer:
    """The Trainer of ``recipe``.

    Raises:
        ConfigError: the run cannot work; lists all problems found.
    """
    from ds_trainer.training.trainer import Trainer

    model = build_language_model(recipe, inputs.model_config, args.seed, args.allow_new_weights)
    return Trainer(
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
    return Inputs(tokenizer, model_config, train, train_blocks, held_out, eval_blocks, text)


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
        loss=final_loss(trainer),
        targets=text.targets,
        documents=text.documents,
        bytes=text.bytes,
        baselines=baselines,
    )


def final_loss(trainer: Trainer) -> float:
    """The evaluation loss of the final weights. Collective.

    Raises:
        ConfigError: it is not finite.
    """
    loss = loss_of_last_step(trainer)
    if loss is None:
        loss = trainer.evaluate()["eval_loss"]
    if not math.isfinite(loss):
        rate = trainer.args.learning_rate
        raise ConfigError(
            f"The evaluation loss is {loss}: training diverged at arguments.learning_rate={rate}. Lower it, or add a "
            "warm-up (arguments.warmup_steps)."
        )
    return loss


def loss_of_last_step(trainer: Trainer) -> float | None:
    """The evaluation loss of the final weights, if the training has just evaluated them."""
    if trainer.args.load_best_model_at_end:
        return None
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if not evaluations or evaluations[-1]["step"] != trainer.state.global_step:
        return None
    return float(evaluations[-1]["eval_loss"])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages involved, by distribution name."""
    installed = {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": sys.version.split()[0], "ds-trainer": ds_trainer.__version__, **installed}

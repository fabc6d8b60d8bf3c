"""The main job: from a recipe to a trained language model, its weights on disk and a report."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ds_trainer
from ds_trainer.arguments.recipe import Recipe
from ds_trainer.callbacks.records import RecordsCallback
from ds_trainer.data.sources import Corpus
from ds_trainer.data.text_dataset import TokenBlocks, TokenStream, tokenize
from ds_trainer.data.tokenizer import Tokenizer
from ds_trainer.training.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.training.report import (
    Evaluation,
    compression_baselines,
    generate_sample,
    nats_per_token,
    report_text,
)
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.training.trainer import Trainer

RESULTS_NAME = "results.json"


def run(recipe: Recipe) -> dict[str, Any]:
    """Train the model of ``recipe``, evaluate it, save it and report. Called by every rank.

    Everything that the recipe can get wrong is refused before an engine starts. The output directory then holds the
    records of the :class:`~ds_trainer.training.trainer.Trainer`, the weights with the tokenizer, and last of all
    ``results.json``: where it exists, the run was successful.

    Returns:
        The content of ``results.json`` on the main process, an empty dict elsewhere.

    Raises:
        ConfigError: the recipe cannot work; all problems found at once.
    """
    began = time.perf_counter()
    args = recipe.training_arguments()
    inputs = prepare(recipe)

    from ds_trainer.training.trainer import Trainer

    model = build_language_model(recipe, inputs.model_config, args.seed, args.allow_new_weights)
    trainer = Trainer(
        model,
        args,
        train_dataset=inputs.train_blocks,
        eval_dataset=inputs.eval_blocks,
        processing_class=inputs.tokenizer,  # in every checkpoint, and beside the weights at the end
    )
    output_dir = Path(str(args.output_dir))
    baselines: dict[str, dict[str, float]] = {}
    if trainer.is_world_process_zero():
        (output_dir / RESULTS_NAME).unlink(missing_ok=True)  # an older run's success must not vouch for this one
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


@dataclass(frozen=True)
class Inputs:
    """Everything that a recipe names, read and checked. What belongs to evaluation is None when nothing is held out."""

    tokenizer: Tokenizer
    model_config: PretrainedConfig
    train: TokenStream
    train_blocks: TokenBlocks
    eval: TokenStream | None = None
    eval_blocks: TokenBlocks | None = None
    eval_text: bytes = b""


def prepare(recipe: Recipe) -> Inputs:
    """Read and check what ``recipe`` names: data, tokenizer, model config. No weights, no engine.

    Raises:
        ConfigError: some of it is not there or cannot work; the problems of data and model together.
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
        raise ConfigError(f"data.train: {len(corpus.train_files)} files were found, but there is no text in them.")
    train_blocks = TokenBlocks(train.tokens, length)
    if not corpus.has_eval:
        return Inputs(tokenizer, model_config, train, train_blocks)
    documents = list(corpus.eval_documents())
    if not documents:
        raise ConfigError("data: there is no text to evaluate on; name other files in data.eval or use held_out_every.")
    held_out = tokenize(documents, tokenizer)
    eval_blocks = TokenBlocks(held_out.tokens, length, keep_ragged=True)
    text = b"".join(document.data for document in documents)
    return Inputs(tokenizer, model_config, train, train_blocks, held_out, eval_blocks, text)


def draw_baselines(trainer: Trainer, text: TokenStream, baselines: dict[str, dict[str, float]]) -> None:
    """Give ``baselines`` to the loss plot as horizontal lines, as the loss in nats a token that they correspond to."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RecordsCallback):
            callback.baselines = {
                name: nats_per_token(packed["bits_per_byte"], text.targets, text.bytes)
                for name, packed in baselines.items()
            }


def evaluate(trainer: Trainer, text: TokenStream, baselines: dict[str, dict[str, float]]) -> Evaluation:
    """The trainer's loss on the held-out ``text``, set beside ``baselines``. Collective.

    Raises:
        ConfigError: the loss is not finite; such a model is no result.
    """
    loss = trainer.evaluate()["eval_loss"]
    if not math.isfinite(loss):
        rate = trainer.args.learning_rate
        raise ConfigError(
            f"The evaluation loss is {loss}: training diverged at arguments.learning_rate={rate}. Lower it, or give it "
            "a warm-up (arguments.warmup_steps)."
        )
    return Evaluation(
        loss=loss,
        targets=text.targets,
        documents=text.documents,
        bytes=text.bytes,
        baselines=baselines,
    )


def versions() -> dict[str, str]:
    """Versions of what took part, by distribution name."""
    installed = {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": sys.version.split()[0], "ds-trainer": ds_trainer.__version__, **installed}

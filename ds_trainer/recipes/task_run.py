"""Runs the Trainer of a task: trains, evaluates, saves the model with its tokenizer, and writes the results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes.language_model_job import RESULTS_NAME, versions
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_json

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


def train_and_report(recipe: Recipe, trainer: Trainer, samples: Mapping[str, int], began: float) -> dict[str, Any]:
    """Train, evaluate if there is evaluation data, save and report. Collective.

    Args:
        recipe: the recipe of the run.
        trainer: has its data.
        samples: number of samples by name, for the report.
        began: ``time.perf_counter()`` at the start of the job.

    Returns:
        The content of ``results.json`` on the main process, an empty dict elsewhere.
    """
    args = trainer.args
    output_dir = Path(str(args.output_dir))
    is_main = trainer.is_world_process_zero()
    if is_main:
        (output_dir / RESULTS_NAME).unlink(missing_ok=True)  # of an earlier run
    prepared = time.perf_counter()
    train_output = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trained = time.perf_counter()
    evaluation = trainer.evaluate() if trainer.eval_dataset is not None else None
    evaluated = time.perf_counter()
    trainer.save_model(str(output_dir))
    if not is_main:
        return {}
    results = {
        "task": recipe.task.name,
        "steps": train_output.global_step,
        "train_loss": train_output.training_loss,
        "train_metrics": dict(train_output.metrics),
        "evaluation": evaluation,
        "samples": dict(samples),
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
    print(_report(results), flush=True)
    write_json(output_dir / RESULTS_NAME, results)
    return results


def _report(results: Mapping[str, Any]) -> str:
    lines = [
        "",
        f"Finished {results['steps']:,} steps of {results['task']} in {results['seconds']['total']:.0f} s; training "
        f"loss {results['train_loss']:.4f}.",
    ]
    if results["evaluation"] is None:
        return "\n".join([*lines, "No evaluation: set data.eval or data.held_out for one."])
    skipped = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")
    rows = [
        f"  {name:<28} {value:.4f}"
        for name, value in results["evaluation"].items()
        if isinstance(value, float) and name not in skipped
    ]
    return "\n".join([*lines, *rows])


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
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{recipe.where(key)}: {key}: {name!r} has no tokenizer that can be loaded: {reason}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

"""What every job does with its Trainer: trains, evaluates, saves, and writes ``results.json``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ds_trainer
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_json
from ds_trainer.utils.printable import shown
from ds_trainer.utils.secrets import without_secrets
from ds_trainer.utils.units import counted, human_duration

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

RESULTS_NAME = "results.json"


def train_and_report(
    recipe: Recipe,
    trainer: Trainer,
    began: float,
    evaluate: Callable[[], Any],
    describe: Callable[[Any, Any], Mapping[str, Any]],
    text: Callable[[dict[str, Any], Any], str],
) -> dict[str, Any]:
    """Train, evaluate, save the model, and report. Collective.

    ``results.json`` is written last and so exists only if the run succeeded.

    Args:
        recipe: the recipe of the run.
        trainer: has its data.
        began: ``time.perf_counter()`` at the start of the job.
        evaluate: called on all ranks after the training; what it returns is given to the other two.
        describe: what is particular to the job, from the output of ``train()`` and the evaluation. On the main
            process, after the model was saved.
        text: the printed report, from the results and the evaluation.

    Returns:
        The content of ``results.json`` on the main process, an empty dict elsewhere.
    """
    args = trainer.args
    output_dir = Path(str(args.output_dir))
    is_main = trainer.is_world_process_zero()
    if is_main:
        (output_dir / RESULTS_NAME).unlink(missing_ok=True)  # of an earlier run
    called = time.perf_counter()
    output = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trained, phases = time.perf_counter(), trainer._ds_trainer.telemetry.phase_seconds()
    evaluation = evaluate()
    evaluated = time.perf_counter()
    trainer.save_model(str(output_dir))
    saved = time.perf_counter()
    if not is_main:
        return {}
    results = {
        "task": recipe.task.name,
        "steps": output.global_step,
        "epochs": float(trainer.state.epoch or 0.0),
        "train_loss": output.training_loss,
        "train_metrics": dict(output.metrics),
        **describe(output, evaluation),
        "seconds": _parts(
            prepare=called - began + max(0.0, trained - called - sum(phases.values())),
            train=output.metrics["train_runtime"],
            evaluate=evaluated - trained + phases.get("evaluation", 0.0),
            save=saved - evaluated + phases.get("saving", 0.0),
            total=time.perf_counter() - began,
        ),
        "output_dir": str(output_dir),
        "recipe": {"path": recipe.path, **recipe.to_dict()},
        "versions": versions(),
    }
    print(shown(text(results, evaluation)), flush=True)
    write_json(output_dir / RESULTS_NAME, without_secrets(results))
    return results


def _parts(total: float, **seconds: float) -> dict[str, float]:
    """The parts, ``other`` (trackers, plots, the report, a sample), and ``total``, which is their sum."""
    return {**seconds, "other": max(0.0, total - sum(seconds.values())), "total": total}


def finished_in(results: dict[str, Any]) -> str:
    """The sentence about the time of a job, from the content of ``results.json``."""
    seconds = results["seconds"]
    names = {"prepare": "setup", "train": "training", "evaluate": "evaluation", "save": "saving", "other": "other"}
    parts = ", ".join(f"{name} {human_duration(seconds[key])}" for key, name in names.items())
    done = f"{counted(results['steps'], 'step')}, {results['epochs']:.2f} epochs"
    return f"Finished {done}, in {human_duration(seconds['total'])} ({parts})."


def final_evaluation(trainer: Trainer) -> dict[str, Any]:
    """The evaluation of the final weights, which the training may just have done. Collective.

    Raises:
        ConfigError: its loss is not finite.
    """
    metrics = _evaluation_of_last_step(trainer) or trainer.evaluate()
    loss = metrics["eval_loss"]
    if not math.isfinite(loss):
        rate = trainer.args.learning_rate
        raise ConfigError(
            f"The evaluation loss is {loss}: training diverged at arguments.learning_rate={rate}. Lower it, or add a "
            "warm-up (arguments.warmup_steps)."
        )
    return metrics


def _evaluation_of_last_step(trainer: Trainer) -> dict[str, Any]:
    """The metrics of the final weights, if the training has just evaluated them; otherwise nothing."""
    if trainer.args.load_best_model_at_end:
        return {}
    last = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
    found = {name: value for entry in last for name, value in entry.items() if name.startswith("eval_")}
    return {**found, "epoch": trainer.state.epoch} if "eval_loss" in found else {}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages involved, by distribution name."""
    installed = {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": sys.version.split()[0], "ds-trainer": ds_trainer.__version__, **installed}

"""``Job``: a recipe that trains, evaluates, saves, and writes ``results.json``."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ds_trainer
from ds_trainer.callbacks.integrations import check_trackers
from ds_trainer.checkpoint.loading.sampled_files import FILES
from ds_trainer.config.compiler import compile_config, user_settings
from ds_trainer.config.environment import Environment
from ds_trainer.monitor.report.history import HISTORY_NAME
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.recipes.named_files import named_file_problems
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.training.resume.output_directory import OutputDirectory
from ds_trainer.training.resume.resumption import weights_directory
from ds_trainer.utils.errors import ConfigError, Problems
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.output_files import keep_of_user, write_output_json
from ds_trainer.utils.printable import shown
from ds_trainer.utils.secrets import without_secrets
from ds_trainer.utils.units import counted, human_duration

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

RESULTS_NAME = "results.json"


class Job(ABC):
    """What ``ds-trainer train`` does with a recipe. :meth:`run` calls the other methods in their order.

    Args:
        recipe: what to train.

    Attributes:
        problems: what is known to be wrong. :meth:`prepare` adds to it, and reads no samples if there are any.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.problems = Problems()

    def arguments(self) -> TrainingArguments:
        """The arguments of the recipe. A job that uses the trainer of a library makes them in the library's class.

        Raises:
            ConfigError: they cannot work; lists all problems found.
        """
        return self.recipe.training_arguments()

    @abstractmethod
    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Read and check what the training needs, without weights and engine.

        Args:
            args: what :meth:`arguments` returned, perhaps adapted by a dry run.

        Returns:
            What was read, in lines for the log.

        Raises:
            ConfigError: something is missing or cannot work; lists the problems of data and model.
        """

    @abstractmethod
    def make_trainer(self, args: TrainingArguments) -> Trainer:
        """The Trainer of what :meth:`prepare` has read with the same ``args``.

        Raises:
            ConfigError: the run cannot work; lists all problems found.
        """

    def begin(self, trainer: Trainer) -> None:  # noqa: B027  (most jobs have nothing to write)
        """What is to be written before the training starts. Called by every rank; not by a dry run."""

    @abstractmethod
    def evaluate(self, trainer: Trainer) -> Any:
        """The evaluation of the final weights; None if there is no evaluation data. Collective."""

    @abstractmethod
    def figures(self, trainer: Trainer, evaluation: Any) -> Mapping[str, Any]:
        """Entries of ``results.json`` that this job alone has. On the main process, after the model was saved."""

    @abstractmethod
    def report(self, results: Mapping[str, Any], evaluation: Any) -> str:
        """The printed report, from the content of ``results.json``."""

    def run(self, only_train: bool = False) -> dict[str, Any]:
        """Train, evaluate, save the model, and report; ``only_train``: nothing after training. Called by every rank.

        The output directory has the files of the :class:`~ds_trainer.training.trainer.Trainer`, the weights with the
        tokenizer, and ``results.json``, which is written last and so exists only if the run succeeded.

        Returns:
            The content of ``results.json`` on the main process, an empty dict elsewhere.

        Raises:
            ConfigError: the recipe cannot work; lists all problems found.
        """
        began = time.perf_counter()
        problems = self.problems
        with problems.collecting():
            check_trackers(self.recipe.arguments.get("report_to"))
        try:
            args = self.arguments()
        except ConfigError as error:
            problems.extend(error.problems)
            args = self.recipe.training_arguments()
        output_dir = Path(str(args.output_dir))
        _check_settings(args, output_dir, problems)
        problems.extend(named_file_problems(self.recipe, tokenizer=False))
        lines: Sequence[str] = ()
        with problems.collecting():
            lines = self.prepare(args)
        problems.raise_if_any()
        for line in lines:
            logger.info("%s", line)
        trainer = self.make_trainer(args)
        self.begin(trainer)
        is_main = trainer.is_world_process_zero()
        if is_main:
            keep_of_user(output_dir / RESULTS_NAME)
            (output_dir / RESULTS_NAME).unlink(missing_ok=True)  # of an earlier run
        called = time.perf_counter()
        output = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        if only_train:
            return {}
        trained, phases = time.perf_counter(), trainer._ds_trainer.telemetry.phase_seconds()
        evaluation = self.evaluate(trainer)
        evaluated = time.perf_counter()
        trainer.save_model(str(output_dir))
        saved = time.perf_counter()
        if not is_main:
            return {}
        results = {
            "task": self.recipe.task.name,
            "steps": output.global_step,
            "epochs": float(trainer.state.epoch or 0.0),
            "train_loss": output.training_loss,
            "train_metrics": dict(output.metrics),
            **self.figures(trainer, evaluation),
            "seconds": _parts(
                prepare=called - began + max(0.0, trained - called - sum(phases.values())),
                train=output.metrics["train_runtime"],
                evaluate=evaluated - trained + phases.get("evaluation", 0.0),
                save=saved - evaluated + phases.get("saving", 0.0),
                total=time.perf_counter() - began,
            ),
            "output_dir": str(output_dir),
            "recipe": {"path": self.recipe.path, **self.recipe.to_dict()},
            "versions": versions(),
        }
        print(shown(self.report(results, evaluation)), flush=True)
        write_output_json(output_dir / RESULTS_NAME, without_secrets(results))
        return results


def _check_settings(args: TrainingArguments, output_dir: Path, problems: Problems) -> None:
    """Find settings that cannot work and files that cannot be used, before data is read."""
    user = user_settings(args, problems)
    if user is not None and "scheduler" not in user.value:  # a schedule may need the number of steps
        layout = ParallelLayout.of(args, args.world_size)
        compile_config(args, layout, device=args.device_type, environment=Environment(), problems=problems)
    with problems.collecting():
        OutputDirectory(args, args.resume_from_checkpoint)
    with problems.collecting():
        if args.start_from_weights is not None:
            weights_directory(args.start_from_weights)
    # The final weights replace those that are there: they must be of an earlier run, and not the base model's.
    theirs = [name for name in ("adapter_config.json", "config.json", *FILES) if (output_dir / name).exists()]
    if theirs and not any((output_dir / name).exists() for name in (HISTORY_NAME, RESULTS_NAME, "latest")):
        problems.add(
            f"output_dir={output_dir} ({args.where('output_dir')}) has a model that no run of ds_trainer wrote there "
            f"({', '.join(theirs)}), and the trained one would replace it. Set another output_dir."
        )


def _parts(total: float, **seconds: float) -> dict[str, float]:
    """The parts, ``other`` (trackers, plots, the report, a sample), and ``total``, which is their sum."""
    return {**seconds, "other": max(0.0, total - sum(seconds.values())), "total": total}


def finished_in(results: Mapping[str, Any]) -> str:
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
    metrics_of_step = {name: value for entry in last for name, value in entry.items() if name.startswith("eval_")}
    return {**metrics_of_step, "epoch": trainer.state.epoch} if "eval_loss" in metrics_of_step else {}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages involved, by distribution name."""
    installed = {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": sys.version.split()[0], "ds-trainer": ds_trainer.__version__, **installed}

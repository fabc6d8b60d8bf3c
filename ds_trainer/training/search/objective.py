"""The default objective of a search, and the check of a custom one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ds_trainer.arguments.enums import NamedValue
from ds_trainer.training.evaluation.outputs import RUNTIME_METRICS
from ds_trainer.training.search.trial import SearchError

_SPEED = ("_runtime", "_per_second")
_MEMORY = re.compile("_mem_(cpu|gpu)(_|$)")


def default_compute_objective(metrics: Mapping[str, Any]) -> float:
    """The sum of all metrics, or the evaluation loss if there are no other metrics.

    The sum leaves out evaluation losses (one for each evaluation set), epoch, speed, memory, the number of items, and
    values that are not numbers.

    Args:
        metrics: the result of ``Trainer.evaluate``.

    Raises:
        SearchError: there is neither a metric nor a loss.
    """
    prefixes = {"eval"} | {name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")}
    losses = {f"{prefix}_loss" for prefix in prefixes}
    excluded = {"epoch"} | {f"{prefix}_{name}" for prefix in prefixes for name in RUNTIME_METRICS}
    measured, loss_values = [], []
    for name, value in metrics.items():
        if name in losses:
            loss_values.append(float(value))
        elif _is_number(value) and name not in excluded and not name.endswith(_SPEED) and not _MEMORY.search(name):
            measured.append(float(value))
    if not measured and not loss_values:
        raise SearchError(
            f"The evaluation has neither a loss nor a metric ({', '.join(metrics)}): add labels to the evaluation "
            "set, or pass compute_metrics or compute_objective."
        )
    return sum(measured or loss_values)


def checked_objective(objective: Any, directions: int | None) -> float | list[float]:
    """Check the result of ``compute_objective``, and convert it to one float or to one for each direction.

    Args:
        objective: the result.
        directions: number of directions; None for a single number instead of a list.

    Raises:
        SearchError: the result has another form.
    """
    values = list(objective) if isinstance(objective, Sequence) and not isinstance(objective, str) else [objective]
    numbers = [value.item() if callable(getattr(value, "item", None)) else value for value in values]
    wanted = directions or 1
    if len(numbers) != wanted or not all(_is_number(value) for value in numbers):
        what = "one number" if wanted == 1 else f"{wanted} numbers, one for each direction"
        raise SearchError(f"compute_objective returned {objective!r}, but the search needs {what}.")
    return float(numbers[0]) if directions is None else [float(value) for value in numbers]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The default search spaces: learning rate, epochs, seed and micro-batch size.
#
# Names and ranges are those of the functions of the same names in transformers 5.


_MICRO_BATCHES = (4, 8, 16, 32, 64)


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Suggest the values of an optuna trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", list(_MICRO_BATCHES)),
    }


def default_hp_space_ray(trial: Any = None) -> dict[str, Any]:
    """The search space of Ray Tune. Needs ray. Unlike in transformers, seeds are integers."""
    from ray import tune

    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.randint(1, 41),
        "per_device_train_batch_size": tune.choice(list(_MICRO_BATCHES)),
    }


def default_hp_space_wandb(trial: Any = None) -> dict[str, Any]:
    """The configuration of a W&B sweep."""
    return {
        "method": "random",
        "metric": {"name": "objective", "goal": "minimize"},
        "parameters": {
            "learning_rate": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 6},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": list(_MICRO_BATCHES)},
        },
    }


# The result of a search, and the names of the backends.


class BestRun(NamedTuple):
    """The best trial of a search. With several objectives, one of the Pareto-optimal trials.

    Attributes:
        run_id: identifies the trial; its files are in ``run-<run_id>`` in ``output_dir``, unless ``hp_name`` gives
            another name.
        objective: the objective value: a number, or one for each direction.
        hyperparameters: the values that the backend proposed, by name.
        run_summary: Ray's ``ExperimentAnalysis``, the id of a W&B sweep, None for optuna.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


class HPSearchBackend(NamedValue):
    """The built-in backends."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"

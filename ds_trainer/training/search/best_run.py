"""The result of a search, and the names of the backends."""

from __future__ import annotations

from typing import Any, NamedTuple

from ds_trainer.arguments.enums import NamedValue


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

"""What a search gives back, and the names of those that can search."""

from __future__ import annotations

from typing import Any, NamedTuple

from ds_trainer.arguments.enums import NamedValue


class BestRun(NamedTuple):
    """The best trial of a search; of several objectives, one of those that no other trial beats in all of them.

    Attributes:
        run_id: identifies the trial; its files are in ``run-<run_id>`` below ``output_dir``, unless ``hp_name`` says
            otherwise.
        objective: what it reached: a number, or one for each direction.
        hyperparameters: the values that the backend proposed, by name.
        run_summary: Ray's ``ExperimentAnalysis``, the id of a W&B sweep, None for optuna.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


class HPSearchBackend(NamedValue):
    """The backends that this package brings."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"

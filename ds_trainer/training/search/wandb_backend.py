"""Weights & Biases sweeps: W&B proposes the values, and the agent on rank 0 runs the trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_trainer.training.search.backend import check_direction, is_installed
from ds_trainer.training.search.best_run import BestRun
from ds_trainer.training.search.spaces import default_hp_space_wandb
from ds_trainer.training.search.trial import SearchTrial
from ds_trainer.training.search.trial_coordinator import TrialCoordinator
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

_KEYWORDS = ("entity", "metric", "name", "project", "sweep_id")


class WandbBackend:
    """Searches with a sweep: a new one, or that of ``sweep_id``.

    Keyword arguments: ``project``, ``entity`` and ``name`` of the sweep, ``sweep_id`` of an existing sweep, and the
    ``metric`` of the sweep (default ``eval/loss``, the name that the tracker logs).
    """

    name = "wandb"
    install = "wandb"

    def is_available(self) -> bool:
        """Whether wandb can be imported."""
        return is_installed("wandb")

    def default_hp_space(self, trial: Any = None) -> dict[str, Any]:
        """See :func:`~ds_trainer.training.search.spaces.default_hp_space_wandb`."""
        return default_hp_space_wandb(trial)

    def run(self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any) -> BestRun:
        """Run the search. Returns the best run of this agent, with the id of the sweep as ``run_summary``.

        Raises:
            ConfigError: unknown keyword arguments.
            RuntimeError: no trial completed.
        """
        check_direction(direction, several=False)
        unknown = [name for name in kwargs if name not in _KEYWORDS]
        if unknown:
            raise ConfigError(
                [
                    f"{name}={kwargs[name]!r} is not an argument of this backend.{did_you_mean(name, _KEYWORDS)}"
                    for name in unknown
                ]
            )
        coordinator = TrialCoordinator(trainer)
        return coordinator.lead(lambda: _sweep(trainer, coordinator, n_trials, str(direction), **kwargs))


def _sweep(
    trainer: Trainer,
    coordinator: TrialCoordinator,
    n_trials: int | None,
    direction: str,
    *,
    sweep_id: str | None = None,
    project: str | None = None,
    entity: str | None = None,
    name: str | None = None,
    metric: str = "eval/loss",
) -> BestRun:
    import wandb

    from ds_trainer.callbacks.integrations.wandb import WandbCallback

    assert trainer.hp_space is not None
    reports = any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks)
    reporter = None if reports else WandbCallback()
    if reporter is not None:  # the tracker logs the metric of the sweep
        trainer.callback_handler.add_callback(reporter)
    found: list[BestRun] = []
    failures: list[str] = []

    def objective() -> None:
        if coordinator.fatal_error is not None:
            return
        run = wandb.run or wandb.init()
        values = {key: value for key, value in dict(run.config).items() if not key.startswith("_")}
        label = f"run-{run.id}" if trainer.hp_name is None else str(trainer.hp_name(values))
        outcome = coordinator.run(SearchTrial(values, values, values, str(run.id), label))
        if outcome.error is not None:
            failures.append(f"{type(outcome.error).__name__}: {outcome.error}")
            raise outcome.error  # the agent marks the run as failed
        run.summary["objective"] = outcome.objective
        found.append(BestRun(str(run.id), outcome.objective, values))

    try:
        if sweep_id is None:
            space = dict(trainer.hp_space(None))
            space["metric"] = {**space.get("metric", {}), "name": metric, "goal": direction}
            sweep_id = wandb.sweep({**space, **({"name": name} if name else {})}, project=project, entity=entity)
        wandb.agent(sweep_id, function=objective, count=n_trials, project=project, entity=entity)
    finally:
        if reporter is not None:
            trainer.callback_handler.remove_callback(reporter)
    if coordinator.fatal_error is not None:
        raise coordinator.fatal_error
    if not found:
        last = f" Last error: {failures[-1]}" if failures else ""
        raise RuntimeError(f"No trial of the sweep {sweep_id} completed; {len(failures)} failed.{last}")
    best = (min if direction == "minimize" else max)(found, key=lambda run: run.objective)
    return best._replace(run_summary=sweep_id)

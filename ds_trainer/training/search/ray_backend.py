"""Ray Tune: each trial runs in a separate Ray process, with a copy of the Trainer and its own process group.

Source: ray 2.60, ``ray.tune.run`` and its function API.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ds_trainer.training.search.backend import check_direction, is_installed
from ds_trainer.training.search.best_run import BestRun
from ds_trainer.training.search.spaces import default_hp_space_ray
from ds_trainer.training.search.trial import SearchTrial
from ds_trainer.training.search.trial_coordinator import TrialCoordinator
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.ranks import free_port

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)
_SCHEDULERS_THAT_MOVE_WEIGHTS = (
    "PopulationBasedTraining",
    "PopulationBasedTrainingReplay",
    "PB2",
    "HyperBandForBOHB",
    "HyperBandScheduler",
)
# Attributes of the Trainer and its machinery that a trial rebuilds, or that cannot be pickled.
_NOT_SENT = (
    "memory_tracker",
    "setup",
    "accelerator",
    "model",
    "model_wrapped",
    "engines",
    "micro_batches",
    "checkpointer",
)


class RayBackend:
    """Searches with ``ray.tune.run``, and takes its keyword arguments.

    The default of ``resources_per_trial`` is one CPU, and one GPU if the arguments use a GPU.
    """

    name = "ray"
    install = "'ray[tune]'"

    def is_available(self) -> bool:
        """Whether Ray Tune can be imported."""
        return is_installed("ray") and is_installed("ray.tune")

    def default_hp_space(self, trial: Any = None) -> dict[str, Any]:
        """See :func:`~ds_trainer.training.search.spaces.default_hp_space_ray`."""
        return default_hp_space_ray(trial)

    def run(self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any) -> BestRun:
        """Run the search. The ``run_summary`` of the best run is the ``ExperimentAnalysis`` of Ray.

        Raises:
            ConfigError: several ranks, or a scheduler that moves weights between trials.
            RuntimeError: no trial completed.
        """
        from ray import tune

        check_direction(direction, several=False)
        _check(trainer, n_trials, kwargs)
        assert trainer.hp_space is not None
        resources = {"cpu": 1, **({"gpu": 1} if trainer.args.n_gpu else {})}
        options = {
            "resources_per_trial": resources,
            "progress_reporter": tune.CLIReporter(metric_columns=["objective"]),
            **kwargs,
        }
        options.setdefault("raise_on_failed_trial", False)
        output_dir = os.path.abspath(str(trainer.args.output_dir))
        space = trainer.hp_space(None)
        with _without_engine(trainer):
            trainable = tune.with_parameters(_run_trial, trainer=trainer, output_dir=output_dir)
            analysis = tune.run(trainable, config=space, num_samples=n_trials, **options)
        scope = os.environ.get("RAY_SCOPE", "last")
        best = analysis.get_best_trial("objective", str(direction)[:3], scope)
        if best is None:
            raise RuntimeError(f"None of {len(analysis.trials)} trials completed; the log of Ray has the reasons.")
        return BestRun(best.trial_id, best.last_result["objective"], dict(best.config), analysis)


def _check(trainer: Trainer, n_trials: int | None, kwargs: dict[str, Any]) -> None:
    problems = []
    ranks = trainer.args.world_size
    if ranks > 1:
        problems.append(
            f"backend='ray' starts a process for each trial, but this is one of {ranks} ranks of a launcher. Start the "
            "script as one process, or use backend='optuna', which runs each trial on all ranks."
        )
    if n_trials is None:
        problems.append("n_trials=None: Ray needs a number.")
    scheduler = kwargs.get("scheduler")
    if any(base.__name__ in _SCHEDULERS_THAT_MOVE_WEIGHTS for base in type(scheduler).__mro__):
        problems.append(
            f"scheduler={type(scheduler).__name__} pauses trials and moves weights between them, which is not "
            "supported. Use ASHAScheduler or MedianStoppingRule."
        )
    if scheduler is not None and str(trainer.args.eval_strategy) == "no":
        problems.append(
            f"scheduler={type(scheduler).__name__} decides at evaluations, but eval_strategy=no "
            f"({trainer.args.where('eval_strategy')}). Set it to steps or epoch."
        )
    if problems:
        raise ConfigError(problems)


@contextmanager
def _without_engine(trainer: Trainer) -> Iterator[None]:
    """Remove the attributes of ``trainer`` that are not sent to the processes of the trials."""
    owners = [vars(trainer), vars(trainer._ds_trainer)]
    kept = [{name: owner.pop(name) for name in _NOT_SENT if name in owner} for owner in owners]
    handler_model, trainer._ds_trainer.events.handler.model = trainer._ds_trainer.events.handler.model, None
    try:
        yield
    finally:
        for owner, attributes in zip(owners, kept, strict=True):
            owner.update(attributes)
        trainer._ds_trainer.events.handler.model = handler_model


def _run_trial(config: dict[str, Any], trainer: Trainer, output_dir: str) -> None:
    """Run one trial in a Ray process."""
    from ray import tune

    rank_environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(rank_environment, MASTER_PORT=str(free_port()))
    trainer._ds_trainer.start_process()
    trainer.args.output_dir = output_dir  # absolute: a Ray process has its own working directory
    identity = tune.get_context().get_trial_id()
    name = f"run-{identity}" if trainer.hp_name is None else str(trainer.hp_name(config))

    reported = False

    def report(objective: Any, step: int, metrics: dict[str, Any]) -> bool:
        nonlocal reported
        reported = True
        tune.report({**metrics, "objective": objective, "step": step})
        return False  # Ray ends the process of a trial that it prunes

    coordinator = TrialCoordinator(trainer)
    outcome = coordinator.run(SearchTrial(dict(config), dict(config), dict(config), identity, name), report)
    if outcome.error is not None:
        raise outcome.error
    if not reported:
        tune.report({"objective": outcome.objective})

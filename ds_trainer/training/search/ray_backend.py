"""Ray Tune: each trial is a process of Ray's, with a copy of the trainer and a process group of its own.

Source: ray 2.60, ``ray.tune.run`` and its function API.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ds_trainer.monitor.memory_tracker import MemoryTracker
from ds_trainer.training.search.backend import check_direction, is_installed
from ds_trainer.training.search.best_run import BestRun
from ds_trainer.training.search.conductor import Conductor
from ds_trainer.training.search.spaces import default_hp_space_ray
from ds_trainer.training.search.trial import SearchTrial
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.ranks import free_port

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)
_MOVES_WEIGHTS = (
    "PopulationBasedTraining",
    "PopulationBasedTrainingReplay",
    "PB2",
    "HyperBandForBOHB",
    "HyperBandScheduler",
)
_LEFT_BEHIND = ("_memory_tracker", "stage", "accelerator", "model", "model_wrapped", "_engine", "_evaluation_engine")


class RayBackend:
    """Searches with ``ray.tune.run``, whose keywords are taken.

    ``resources_per_trial`` is one CPU, and one GPU where the arguments use one, unless it is given.
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
        """Search; the best run, with Ray's ``ExperimentAnalysis`` as ``run_summary``.

        Raises:
            ConfigError: several ranks, or a scheduler that moves weights between trials.
            RuntimeError: no trial was completed.
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
        home = os.path.abspath(str(trainer.args.output_dir))
        space = trainer.hp_space(None)
        with _without_engine(trainer):
            trainable = tune.with_parameters(_run_trial, trainer=trainer, output_dir=home)
            analysis = tune.run(trainable, config=space, num_samples=n_trials, **options)
        scope = os.environ.get("RAY_SCOPE", "last")
        best = analysis.get_best_trial("objective", str(direction)[:3], scope)
        if best is None:
            raise RuntimeError(f"None of {len(analysis.trials)} trials was completed; Ray has logged why.")
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
        problems.append("n_trials=None: Ray wants a number.")
    scheduler = kwargs.get("scheduler")
    if any(base.__name__ in _MOVES_WEIGHTS for base in type(scheduler).__mro__):
        problems.append(
            f"scheduler={type(scheduler).__name__} pauses trials and moves their weights about, which is not "
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
    """Take away from ``trainer`` what cannot go to another process, or is made there anew."""
    kept = {name: vars(trainer).pop(name) for name in _LEFT_BEHIND if name in vars(trainer)}
    handler_model, trainer.callback_handler.model = trainer.callback_handler.model, None
    try:
        yield
    finally:
        vars(trainer).update(kept)
        trainer.callback_handler.model = handler_model


def _run_trial(config: dict[str, Any], trainer: Trainer, output_dir: str) -> None:
    """What a process of Ray's does."""
    from ray import tune
    from torch import nn

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(free_port()))
    trainer._memory_tracker = MemoryTracker(trainer.device, enabled=False)
    trainer.stage = trainer._memory_tracker.stage("init")
    trainer._engine = None
    trainer.model = trainer.model_wrapped = nn.Module()
    trainer.args.output_dir = output_dir  # a relative one would lie below this process's own directory
    identity = tune.get_context().get_trial_id()
    name = f"run-{identity}" if trainer.hp_name is None else str(trainer.hp_name(config))

    reported = False

    def report(objective: Any, step: int, metrics: dict[str, Any]) -> bool:
        nonlocal reported
        reported = True
        tune.report({**metrics, "objective": objective, "step": step})
        return False  # Ray ends the process of a trial that it gives up

    conductor = Conductor(trainer)
    outcome = conductor.run(SearchTrial(dict(config), dict(config), dict(config), identity, name), report)
    if outcome.error is not None:
        raise outcome.error
    if not reported:
        tune.report({"objective": outcome.objective})

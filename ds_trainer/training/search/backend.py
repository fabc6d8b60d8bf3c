"""``SearchBackend``: proposes the trials of a search. This module also has the registry of backends.

A custom backend is an object with these members that is passed to :func:`register_backend`. Its name can then be used
as ``backend="..."``. Its :meth:`SearchBackend.run` runs the trials through
:class:`~ds_trainer.training.search.trial_coordinator.TrialCoordinator`, which coordinates the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from ds_trainer.training.search.objective import BestRun, default_hp_space_ray, default_hp_space_wandb
from ds_trainer.training.search.trial import SearchTrial
from ds_trainer.training.search.trial_coordinator import TrialCoordinator
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.ranks import free_port

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


class SearchBackend(Protocol):
    """The interface of a backend."""

    name: str
    """The value of ``backend`` that selects it."""
    install: str
    """The argument of ``pip install``."""

    def is_available(self) -> bool:
        """Whether it is installed."""

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """The search space if the user passes none."""

    def run(
        self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any
    ) -> BestRun | list[BestRun]:
        """Run the search. Called on all ranks; ``trainer.hp_space`` and ``trainer.hp_name`` are set."""


_backends: dict[str, SearchBackend] = {}


def register_backend(backend: SearchBackend) -> None:
    """Make ``backend`` available as ``hyperparameter_search(backend=name)``; replaces a backend of the same name."""
    _backends[backend.name] = backend


def find_backend(name: Any) -> SearchBackend:
    """The backend of this name; for None, the first one that is installed.

    Raises:
        ConfigError: the backend is unknown or not installed; lists those that are installed.
    """
    known = _known()
    installed = [backend.name for backend in known.values() if backend.is_available()]
    have = f"Installed: {', '.join(installed) or 'none'}."
    if name is None:
        if installed:
            return known[installed[0]]
        choices = " or ".join(f"`pip install {backend.install}`" for backend in known.values())
        raise ConfigError(f"hyperparameter_search: no backend is installed. Run {choices}.")
    wanted = str(getattr(name, "value", name))
    if wanted not in known:
        raise ConfigError(
            f"backend={wanted!r} is unknown.{did_you_mean(wanted, known)} Known: {', '.join(known)}. {have}"
        )
    if wanted not in installed:
        raise ConfigError(f"backend={wanted!r} is not installed: `pip install {known[wanted].install}`. {have}")
    return known[wanted]


def is_installed(package: str) -> bool:
    """Whether a module of this (possibly dotted) name can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def check_direction(direction: Any, *, several: bool) -> None:
    """Reject an invalid direction.

    Raises:
        ConfigError: the direction is invalid, or a list although ``several`` is False.
    """
    directions = direction if isinstance(direction, list | tuple) else [direction]
    if not directions or not set(map(str, directions)) <= {"minimize", "maximize"}:
        raise ConfigError(f"direction={direction!r}: use 'minimize' or 'maximize', or a list of them.")
    if isinstance(direction, list | tuple) and not several:
        raise ConfigError(f"direction={direction!r}: only optuna supports several directions.")


def _known() -> dict[str, SearchBackend]:
    from ds_trainer.training.search.optuna_backend import OptunaBackend

    own: list[SearchBackend] = [OptunaBackend(), RayBackend(), WandbBackend()]
    return {**{backend.name: backend for backend in own}, **_backends}


# Weights & Biases sweeps: W&B proposes the values, and the agent on rank 0 runs the trials.


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
        """See :func:`~ds_trainer.training.search.objective.default_hp_space_wandb`."""
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
    runs: list[BestRun] = []
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
        runs.append(BestRun(str(run.id), outcome.objective, values))

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
    if not runs:
        last = f" Last error: {failures[-1]}" if failures else ""
        raise RuntimeError(f"No trial of the sweep {sweep_id} completed; {len(failures)} failed.{last}")
    best = (min if direction == "minimize" else max)(runs, key=lambda run: run.objective)
    return best._replace(run_summary=sweep_id)


# Ray Tune: each trial runs in a separate Ray process, with a copy of the Trainer and its own process group.
#
# Source: ray 2.60, ``ray.tune.run`` and its function API.


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
        """See :func:`~ds_trainer.training.search.objective.default_hp_space_ray`."""
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

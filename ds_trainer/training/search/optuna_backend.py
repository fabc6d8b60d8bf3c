"""optuna: the study is on rank 0, which broadcasts the values of each trial to the other ranks.

The keyword arguments are those of ``optuna.create_study`` and ``Study.optimize`` (optuna 5).
"""

from __future__ import annotations

import inspect
import socket
from typing import TYPE_CHECKING, Any

import psutil

from ds_trainer.training.search.backend import check_direction, is_installed
from ds_trainer.training.search.objective import BestRun, default_hp_space_optuna
from ds_trainer.training.search.trial import SearchTrial
from ds_trainer.training.search.trial_coordinator import TrialCoordinator
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    import optuna

    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)
PROCESS = "ds_trainer:process"
"""User attribute of a trial: the process that runs it."""
ERROR = "ds_trainer:error"
"""User attribute of a failed trial: the error."""


class OptunaBackend:
    """Searches with an optuna study, in memory or in a ``storage``."""

    name = "optuna"
    install = "optuna"

    def is_available(self) -> bool:
        """Whether optuna can be imported."""
        return is_installed("optuna")

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """See :func:`~ds_trainer.training.search.objective.default_hp_space_optuna`."""
        return default_hp_space_optuna(trial)

    def run(
        self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any
    ) -> BestRun | list[BestRun]:
        """Run the search; see ``Trainer.hyperparameter_search``. It records failed trials and continues.

        Raises:
            ConfigError: keyword arguments that are unknown to optuna or not supported.
            RuntimeError: no trial was completed.
        """
        check_direction(direction, several=True)
        creation, optimization = _split(kwargs, direction)
        if n_trials is None and optimization.get("timeout") is None:
            raise ConfigError("n_trials=None sets no limit: pass timeout=<seconds> with it.")
        several = list(direction) if isinstance(direction, list | tuple) else None
        coordinator = TrialCoordinator(trainer, None if several is None else len(several))

        def search() -> BestRun | list[BestRun]:
            study = _study(creation, several or [str(direction)])
            _Search(trainer, coordinator, study).optimize(n_trials, optimization)
            if coordinator.fatal_error is not None:
                raise coordinator.fatal_error
            return _best(study)

        return coordinator.lead(search)


class _Search:
    """One call of ``Study.optimize``, on rank 0."""

    def __init__(self, trainer: Trainer, coordinator: TrialCoordinator, study: optuna.Study) -> None:
        self.trainer = trainer
        self.coordinator = coordinator
        self.study = study
        self.several = len(study.directions) > 1

    def optimize(self, n_trials: int | None, options: dict[str, Any]) -> None:
        self.study.optimize(self._objective, n_trials=n_trials, **{"catch": (Exception,), **options})

    def _objective(self, trial: optuna.Trial) -> Any:
        import optuna

        process = psutil.Process()
        trial.set_user_attr(PROCESS, {"host": socket.gethostname(), "pid": process.pid, "began": process.create_time()})
        try:
            proposed = self._proposed(trial)
        except optuna.TrialPruned:
            raise
        except Exception as error:  # not from a training: every other trial would fail in the same way
            self.coordinator.fatal_error = error
            self.study.stop()
            raise
        reported = -1

        def report(objective: Any, step: int, metrics: dict[str, Any]) -> bool:
            nonlocal reported
            if (
                self.several or step <= reported
            ):  # optuna prunes single-objective studies only, and accepts one report for each step
                return False
            reported = step
            trial.report(objective, step)
            return trial.should_prune()

        outcome = self.coordinator.run(proposed, report)
        if outcome.error is not None:
            trial.set_user_attr(ERROR, f"{type(outcome.error).__name__}: {outcome.error}")
        if self.coordinator.fatal_error is not None:
            self.study.stop()
        if outcome.error is not None:
            raise outcome.error
        if outcome.pruned:
            raise optuna.TrialPruned
        return outcome.objective

    def _proposed(self, trial: optuna.Trial) -> SearchTrial:
        import optuna

        assert self.trainer.hp_space is not None
        values = dict(self.trainer.hp_space(trial))
        name = f"run-{trial.number}" if self.trainer.hp_name is None else str(self.trainer.hp_name(trial))
        # model_init(trial) must see the same on all ranks: a fixed trial suggests no new values.
        single = distributed.world_size() == 1
        source = trial if single else optuna.trial.FixedTrial(trial.params, trial.number)
        return SearchTrial(values, source, dict(trial.params), str(trial.number), name)


def _study(creation: dict[str, Any], directions: list[str]) -> optuna.Study:
    import optuna

    study = optuna.create_study(**creation, directions=directions)  # type: ignore[arg-type]
    of_study = [direction.name.lower() for direction in study.directions]
    if of_study != directions:
        raise ConfigError(
            f"The study {study.study_name!r} has direction {', '.join(of_study)}, not direction="
            f"{', '.join(directions)}. Use the direction of the study, or another study_name."
        )
    _fail_abandoned(study)
    return study


def _fail_abandoned(study: optuna.Study) -> None:
    """Mark running trials as failed if the process that ran them, on this machine, no longer exists."""
    import optuna

    running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    for trial in running:
        process = trial.user_attrs.get(PROCESS)
        if process is not None and process["host"] == socket.gethostname() and not _is_alive(process):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            logger.warning("trial %d was running in a search that was killed: it is marked as failed", trial.number)
        else:
            logger.info("trial %d is running in another process", trial.number)


def _is_alive(process: dict[str, Any]) -> bool:
    try:
        # Process ids are reused; the start time distinguishes processes.
        return abs(psutil.Process(process["pid"]).create_time() - process["began"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def _split(kwargs: dict[str, Any], direction: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``kwargs`` into those of ``create_study`` and those of ``optimize``.

    Raises:
        ConfigError: lists all arguments that cannot be used.
    """
    import optuna

    creates = set(inspect.signature(optuna.create_study).parameters) - {"direction", "directions"}
    optimizes = set(inspect.signature(optuna.Study.optimize).parameters) - {"self", "func", "n_trials"}
    problems = [
        f"{name}={value!r}: neither optuna.create_study nor Study.optimize has this argument."
        f"{did_you_mean(name, creates | optimizes)}"
        for name, value in kwargs.items()
        if name not in creates | optimizes and name != "directions"
    ]
    if "directions" in kwargs:
        problems.append(f"directions={kwargs['directions']!r}: pass it as direction=[...].")
    if kwargs.get("n_jobs", 1) != 1:
        problems.append(
            f"n_jobs={kwargs['n_jobs']}: a process has one engine, so its trials run one after the other. To run "
            "trials concurrently, start several jobs with the same storage, study_name and load_if_exists=True."
        )
    if isinstance(direction, list | tuple) and len(direction) > 1 and kwargs.get("pruner") is not None:
        problems.append(
            f"pruner={type(kwargs['pruner']).__name__} and direction={list(direction)}: optuna prunes "
            "single-objective studies only. Remove the pruner."
        )
    if problems:
        raise ConfigError(problems)
    creation = {name: value for name, value in kwargs.items() if name in creates}
    return creation, {name: value for name, value in kwargs.items() if name in optimizes}


def _best(study: optuna.Study) -> BestRun | list[BestRun]:
    import optuna

    states = optuna.trial.TrialState
    if not study.get_trials(deepcopy=False, states=(states.COMPLETE,)):
        trials = study.get_trials(deepcopy=False)
        failed = [trial for trial in trials if trial.state == states.FAIL]
        reasons = [trial.user_attrs[ERROR] for trial in failed if ERROR in trial.user_attrs]
        last = f" Last error: {reasons[-1]}" if reasons else ""
        pruned = sum(trial.state == states.PRUNED for trial in trials)
        raise RuntimeError(f"None of {len(trials)} trials completed: {len(failed)} failed, {pruned} were pruned.{last}")
    if len(study.directions) == 1:
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params)  # type: ignore[arg-type]
    return [BestRun(str(best.number), list(best.values), best.params) for best in study.best_trials]

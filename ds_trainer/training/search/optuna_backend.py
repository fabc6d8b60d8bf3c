"""optuna: the study lives on rank 0; the other ranks are told each trial's values.

Arguments of ``optuna.create_study`` and of ``Study.optimize`` are both taken as keywords. Source of their meaning:
optuna 5.
"""

from __future__ import annotations

import inspect
import socket
from typing import TYPE_CHECKING, Any

import psutil

from ds_trainer.training.search.backend import check_direction, is_installed
from ds_trainer.training.search.best_run import BestRun
from ds_trainer.training.search.conductor import Conductor
from ds_trainer.training.search.spaces import default_hp_space_optuna
from ds_trainer.training.search.trial import SearchTrial
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
"""User attribute of a failed trial: why."""


class OptunaBackend:
    """Searches with an optuna study, in memory or in the storage that is named."""

    name = "optuna"
    install = "optuna"

    def is_available(self) -> bool:
        """Whether optuna can be imported."""
        return is_installed("optuna")

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """See :func:`~ds_trainer.training.search.spaces.default_hp_space_optuna`."""
        return default_hp_space_optuna(trial)

    def run(
        self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any
    ) -> BestRun | list[BestRun]:
        """Search; see ``Trainer.hyperparameter_search``. Failed trials are recorded, and the search goes on.

        Raises:
            ConfigError: keywords that optuna does not know, or that cannot be used here.
            RuntimeError: no trial was completed.
        """
        check_direction(direction, several=True)
        creation, optimisation = _split(kwargs, direction)
        if n_trials is None and optimisation.get("timeout") is None:
            raise ConfigError("n_trials=None searches without end: pass timeout=<seconds> with it.")
        several = list(direction) if isinstance(direction, list | tuple) else None
        conductor = Conductor(trainer, None if several is None else len(several))

        def search() -> BestRun | list[BestRun]:
            study = _study(creation, several or [str(direction)])
            _Search(trainer, conductor, study).optimize(n_trials, optimisation)
            if conductor.ends_with is not None:
                raise conductor.ends_with
            return _best(study)

        return conductor.lead(search)


class _Search:
    """One call of ``Study.optimize``, on rank 0."""

    def __init__(self, trainer: Trainer, conductor: Conductor, study: optuna.Study) -> None:
        self.trainer = trainer
        self.conductor = conductor
        self.study = study
        self.several = len(study.directions) > 1

    def optimize(self, n_trials: int | None, options: dict[str, Any]) -> None:
        self.study.optimize(self._objective, n_trials=n_trials, **{"catch": (Exception,), **options})

    def _objective(self, trial: optuna.Trial) -> Any:
        import optuna

        trial.set_user_attr(PROCESS, _this_process())
        try:
            proposed = self._proposed(trial)
        except optuna.TrialPruned:
            raise
        except Exception as error:  # not of a training: the next trial would meet it too
            self._end_with(error)
            raise
        reported = -1

        def report(objective: Any, step: int, metrics: dict[str, Any]) -> bool:
            nonlocal reported
            if self.several or step <= reported:  # optuna prunes one objective only, and takes a step once
                return False
            reported = step
            trial.report(objective, step)
            return trial.should_prune()

        outcome = self.conductor.run(proposed, report)
        if outcome.error is not None:
            trial.set_user_attr(ERROR, f"{type(outcome.error).__name__}: {outcome.error}")
        if self.conductor.ends_with is not None:
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
        # What model_init(trial) sees must not differ between ranks: what was suggested, and nothing new.
        alone = distributed.world_size() == 1
        source = trial if alone else optuna.trial.FixedTrial(trial.params, trial.number)
        return SearchTrial(values, source, dict(trial.params), str(trial.number), name)

    def _end_with(self, error: Exception) -> None:
        self.conductor.ends_with = error
        self.study.stop()


def _study(creation: dict[str, Any], directions: list[str]) -> optuna.Study:
    import optuna

    study = optuna.create_study(**creation, directions=directions)  # type: ignore[arg-type]
    found = [direction.name.lower() for direction in study.directions]
    if found != directions:
        raise ConfigError(
            f"The study {study.study_name!r} has direction {', '.join(found)}, but direction={', '.join(directions)} "
            "is asked for. Take that of the study, or another study_name."
        )
    _fail_abandoned(study)
    return study


def _fail_abandoned(study: optuna.Study) -> None:
    """Mark trials as failed that a process of this machine was running when it ended."""
    import optuna

    running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    for trial in running:
        process = trial.user_attrs.get(PROCESS)
        if process is not None and process["host"] == socket.gethostname() and not _is_alive(process):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            logger.warning("trial %d was left running by a search that was killed: it counts as failed", trial.number)
        else:
            logger.info("trial %d is being run by another process", trial.number)


def _this_process() -> dict[str, Any]:
    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "began": process.create_time()}


def _is_alive(process: dict[str, Any]) -> bool:
    try:
        # A number is given out again; the moment at which it began tells processes apart.
        return abs(psutil.Process(process["pid"]).create_time() - process["began"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def _split(kwargs: dict[str, Any], direction: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """``kwargs`` as those of ``create_study`` and those of ``optimize``.

    Raises:
        ConfigError: all that cannot be used.
    """
    import optuna

    creates = set(inspect.signature(optuna.create_study).parameters) - {"direction", "directions"}
    optimises = set(inspect.signature(optuna.Study.optimize).parameters) - {"self", "func", "n_trials"}
    problems = [
        f"{name}={value!r}: neither optuna.create_study nor Study.optimize takes it."
        f"{did_you_mean(name, creates | optimises)}"
        for name, value in kwargs.items()
        if name not in creates | optimises and name != "directions"
    ]
    if "directions" in kwargs:
        problems.append(f"directions={kwargs['directions']!r}: pass it as direction=[...].")
    if kwargs.get("n_jobs", 1) != 1:
        problems.append(
            f"n_jobs={kwargs['n_jobs']}: a process has one engine, so that its trials run one after the other. Start "
            "the search in several jobs with the same storage, study_name and load_if_exists=True instead."
        )
    if isinstance(direction, list | tuple) and len(direction) > 1 and kwargs.get("pruner") is not None:
        problems.append(
            f"pruner={type(kwargs['pruner']).__name__} and direction={list(direction)}: optuna prunes trials of one "
            "objective only. Leave the pruner out."
        )
    if problems:
        raise ConfigError(problems)
    creation = {name: value for name, value in kwargs.items() if name in creates}
    return creation, {name: value for name, value in kwargs.items() if name in optimises}


def _best(study: optuna.Study) -> BestRun | list[BestRun]:
    import optuna

    states = optuna.trial.TrialState
    if not study.get_trials(deepcopy=False, states=(states.COMPLETE,)):
        trials = study.get_trials(deepcopy=False)
        failed = [trial for trial in trials if trial.state == states.FAIL]
        reasons = [trial.user_attrs[ERROR] for trial in failed if ERROR in trial.user_attrs]
        last = f" The last one: {reasons[-1]}" if reasons else ""
        pruned = sum(trial.state == states.PRUNED for trial in trials)
        raise RuntimeError(
            f"None of {len(trials)} trials was completed: {len(failed)} failed, {pruned} were pruned.{last}"
        )
    if len(study.directions) == 1:
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params)  # type: ignore[arg-type]
    return [BestRun(str(best.number), list(best.values), best.params) for best in study.best_trials]

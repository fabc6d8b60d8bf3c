"""Methods of the Trainer for hyperparameter search: trainings with different arguments, each with a new model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_trainer.training.loading.model_argument import is_model_reference
from ds_trainer.training.overrides.base import TrainerBase
from ds_trainer.training.search.objective import default_compute_objective
from ds_trainer.training.startup.constructor_checks import keras_problems
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.training.search.objective import BestRun


class SearchMethods(TrainerBase):
    """Hyperparameter search."""

    hp_search_backend: str | None = None
    """The backend of the current search."""
    hp_space: Callable[[Any], dict[str, Any]] | None = None
    hp_name: Callable[[Any], str] | None = None
    compute_objective: Callable[[dict[str, Any]], Any] = staticmethod(default_compute_objective)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Create a new model with ``model_init``, which may take the ``trial`` of a hyperparameter search.

        Raises:
            ConfigError: ``model_init`` takes more than one argument, or returns neither a module nor its name.
        """
        assert self.model_init is not None  # checked before
        taken = list(inspect.signature(self.model_init).parameters.values())
        needed = [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(needed) > 1:
            raise ConfigError(f"model_init needs {', '.join(needed)}, but is called with at most the trial.")
        model = self.model_init(trial) if len(taken) == 1 or needed else self.model_init()
        if not isinstance(model, nn.Module) and not is_model_reference(model):
            raise ConfigError(
                f"model_init returned a {type(model).__name__}, not a torch.nn.Module, the name of a model, or its "
                "configuration."
            )
        if problems := keras_problems(model):
            raise ConfigError(problems)
        return self._ds_trainer.module_of(model)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, Any]], Any] | None = None,
        n_trials: int | None = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train trials with different arguments, and return the best one. Collective: all ranks run each trial.

        Afterward the Trainer is in its initial state: its own arguments, a new model, no engine.

        Args:
            hp_space: for optuna, ``f(trial)`` that suggests values and returns the arguments to set; for ray and wandb,
                ``f(None)`` that returns the space itself. Called on rank 0 only. Default: learning rate, epochs, seed
                and micro-batch size.
            compute_objective: ``f(metrics)`` that returns the number to optimize, or several; default:
                :func:`~ds_trainer.training.search.objective.default_compute_objective`.
            n_trials: number of trials of this call, in addition to those of an existing study.
            direction: ``"minimize"``, ``"maximize"``, or for optuna a list of them, one for each objective.
            backend: ``"optuna"``, ``"ray"``, ``"wandb"``, or a custom backend
                (:mod:`ds_trainer.training.search.backend`); default: the first of them that is installed.
            hp_name: ``f(trial)``, the name of a trial and of its directory; default ``run-<id>``.
            kwargs: further arguments of the backend; see docs/how-to/hyperparameter-search.md.

        Returns:
            The best run; with several directions, all Pareto-optimal runs. The same on every rank.

        Raises:
            ConfigError: there is no ``model_init``, or another argument does not allow a search.
            RuntimeError: no trial completed.
        """
        from ds_trainer.training.search.backend import find_backend

        chosen = find_backend(backend)
        if self.model_init is None:
            raise ConfigError(
                "hyperparameter_search trains a new model for every trial: pass model_init, a function that returns "
                "a model, to the Trainer instead of model."
            )
        if self.eval_dataset is None and "get_eval_dataloader" not in self._ds_trainer.overridden:
            raise ConfigError(
                "hyperparameter_search compares trials by an evaluation: pass an eval_dataset to the Trainer."
            )
        if n_trials is not None and n_trials < 1:
            raise ConfigError(f"n_trials={n_trials} must be at least 1.")
        self.hp_search_backend = chosen.name
        self.hp_space = chosen.default_hp_space if hp_space is None else hp_space
        self.hp_name = hp_name
        self.compute_objective = default_compute_objective if compute_objective is None else compute_objective
        trials = self._ds_trainer.trials
        trials.select(None, self.model_init)
        trials.start_search(self.compute_objective)
        try:
            return chosen.run(self, n_trials, direction, **kwargs)  # type: ignore[arg-type]
        finally:
            self.hp_search_backend = None
            trials.select(None, self.model_init)
            trials.end_search()

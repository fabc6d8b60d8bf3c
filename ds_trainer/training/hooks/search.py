"""Hyper-parameter search: many trainings with other arguments, each on a new model."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.integrations.tracker import Tracker
from ds_trainer.callbacks.state import TrainerControl, export_states, restore_states
from ds_trainer.engine.quantized import keep_order
from ds_trainer.training.construction import keras_problems
from ds_trainer.training.hooks.data import DataHooks
from ds_trainer.training.hooks.evaluation import EvaluationHooks
from ds_trainer.training.hooks.plan import PlanHooks
from ds_trainer.training.hooks.stopping import StoppingHooks
from ds_trainer.training.loading.model_argument import is_named, model_of
from ds_trainer.training.process import configure_process
from ds_trainer.training.search.apply import argument_names, arguments_of
from ds_trainer.training.search.backend import find_backend
from ds_trainer.training.search.best_run import BestRun
from ds_trainer.training.search.objective import checked_objective, default_compute_objective
from ds_trainer.training.search.trial import SearchTrial, TrialPruned, as_trial
from ds_trainer.training.signatures import is_overridden
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.seeds import set_seed

Report = Callable[[Any, int, dict[str, Any]], bool]


class SearchHooks(PlanHooks, EvaluationHooks, StoppingHooks):
    """Search over arguments."""

    hp_search_backend: str | None = None
    """The backend of the search that is under way."""
    hp_space: Callable[[Any], dict[str, Any]] | None = None
    hp_name: Callable[[Any], str] | None = None
    compute_objective: Callable[[dict[str, Any]], Any] = staticmethod(default_compute_objective)
    objective: Any = None
    """Of the last evaluation of the trial."""

    _trial: SearchTrial | None = None
    _own_args: TrainingArguments | None = None
    _report: Report | None = None
    _directions: int | None = None
    _callbacks_at_start: dict[str, Any] | None = None

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from ``model_init``, which may take the ``trial`` of a hyper-parameter search.

        Raises:
            ConfigError: ``model_init`` takes more than one argument, or returns neither a module nor what names one.
        """
        assert self.model_init is not None  # asked before
        taken = list(inspect.signature(self.model_init).parameters.values())
        needed = [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(needed) > 1:
            raise ConfigError(f"model_init needs {', '.join(needed)}, but is called with nothing or the trial only.")
        model = self.model_init(trial) if len(taken) == 1 or needed else self.model_init()
        if not isinstance(model, nn.Module) and not is_named(model):
            raise ConfigError(
                f"model_init returned a {type(model).__name__}, not a torch.nn.Module, the name of a model, or its "
                "configuration."
            )
        if problems := keras_problems(model):
            raise ConfigError(problems)
        return self._model_of(model)

    def _model_of(self, given: Any) -> nn.Module:
        """The module that ``model``, or what ``model_init`` returned, means; with the adapters of ``peft_config``."""
        self.load_report = None
        model: nn.Module = model_of(given, self.args, self.peft_config)
        keep_order(model)
        return model

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
        """Train with one choice of arguments after another; the best one. Collective: all ranks run each trial.

        Afterwards the trainer is as it was when it was made: its own arguments, a new model, no engine.

        Args:
            hp_space: for optuna, ``f(trial)`` that suggests values and returns the arguments to set; for ray and wandb,
                ``f(None)`` that returns the space itself. Called on rank 0 only. Default: learning rate, epochs, seed
                and micro-batch.
            compute_objective: ``f(metrics)`` of an evaluation: the number to optimise, or several; default:
                :func:`~ds_trainer.training.search.objective.default_compute_objective`.
            n_trials: how many trials; of optuna this call's, whatever the study holds already.
            direction: ``"minimize"``, ``"maximize"``, or for optuna a list of them, one for each objective.
            backend: ``"optuna"``, ``"ray"``, ``"wandb"``, or one of your own
                (:mod:`ds_trainer.training.search.backend`); default: the first of them that is installed.
            hp_name: ``f(trial)``, the name of a trial and of its directory; default ``run-<id>``.
            kwargs: further arguments of the backend; see docs/hyperparameter-search.md.

        Returns:
            The best run; with several directions, all that no other one beats. The same on every rank.

        Raises:
            ConfigError: there is no ``model_init``, or something else that cannot be searched with.
            RuntimeError: no trial came to an end.
        """
        chosen = find_backend(backend)
        if self.model_init is None:
            raise ConfigError(
                "hyperparameter_search trains a new model for every trial: make the Trainer with model_init, a "
                "function that returns one, instead of model."
            )
        if self.eval_dataset is None and not is_overridden(self, DataHooks, "get_eval_dataloader"):
            raise ConfigError(
                "hyperparameter_search compares trials by an evaluation: make the Trainer with an eval_dataset."
            )
        if n_trials is not None and n_trials < 1:
            raise ConfigError(f"n_trials={n_trials} must be at least 1.")
        self.hp_search_backend = chosen.name
        self.hp_space = chosen.default_hp_space if hp_space is None else hp_space
        self.hp_name = hp_name
        self.compute_objective = default_compute_objective if compute_objective is None else compute_objective
        self._take_trial(None)
        self._callbacks_at_start = copy.deepcopy(export_states(self.callback_handler.callbacks))
        try:
            return chosen.run(self, n_trials, direction, **kwargs)  # type: ignore[arg-type]
        finally:
            self.hp_search_backend, self._report = None, None
            self._take_trial(None)
            self._callbacks_at_start = None

    # -- one trial ------------------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        """A second training begins like the first: the same seed, a new model where there is a ``model_init``."""
        set_seed(self.args.seed)
        self._end_evaluation_engine()
        if self._engine is None:
            return
        self._engine.close()
        if self.model_init is not None:
            self.model = self.call_model_init(None if self._trial is None else self._trial.source)
        self.model_wrapped = self.model
        self._engine = None
        self.optimizer, self.lr_scheduler = self._given_optimizers

    def _take_trial(self, trial: Any) -> None:
        """Make this the trainer of ``trial``; of its own arguments again where it is None.

        Raises:
            ConfigError: the values cannot work, or there is no ``model_init``.
        """
        if trial is None and self._own_args is None:
            if dict(vars(self.args)) != self._settled_with:  # changed by hand since
                self.args.complete()
                self._begin_anew()
                self._settle()
            return
        own = self.args if self._own_args is None else self._own_args
        if trial is None:
            self._trial, args, self._own_args = None, own, None
        else:
            if self.model_init is None:
                raise ConfigError("train(trial=...) needs a model_init: each trial trains a new model.")
            takes_trial = bool(inspect.signature(self.model_init).parameters)
            taken = as_trial(trial, argument_names(own), takes_trial)
            args = arguments_of(taken, own)
            self._trial, self._own_args = taken, own
        self._forget_engines()
        self.args = args
        configure_process(args)
        self.optimizer, self.lr_scheduler = self._given_optimizers
        self._forget_model()  # its memory is free before the new one takes its own
        self.model = self.call_model_init(None if self._trial is None else self._trial.source)
        self.model_wrapped = self.model
        self._settle()
        self.callback_handler.model = self.model
        self.control = TrainerControl()
        if self._callbacks_at_start is not None:
            restore_states(self.callback_handler.callbacks, copy.deepcopy(self._callbacks_at_start))

    def _end_trial(self, failed: bool) -> None:
        """Give back the memory of a trial that has ended; of one that failed, trackers end their runs."""
        if failed:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, Tracker):
                    callback.on_train_end(self.args, self.state, self.control)
        self._forget_engines()
        self._forget_model()

    def _forget_engines(self) -> None:
        """Close the engines and let go of all that holds their memory or their process groups."""
        self._end_evaluation_engine()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._group_members = self._work = self._flop_rule = None
        self.optimizer = self.lr_scheduler = None
        self.model_wrapped = self.model
        handler = self.callback_handler
        handler.model = handler.optimizer = handler.lr_scheduler = None
        handler.train_dataloader = handler.eval_dataloader = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget_model(self) -> None:
        """Let go of the model, on which an engine leaves hooks that hold the engine."""
        self.model = self.model_wrapped = nn.Module()
        self.label_smoother = self.sequence_cut = None
        gc.collect()

    # -- objectives -----------------------------------------------------------------------------------------------

    def _listen_to_trial(self, report: Report | None, directions: int | None) -> None:
        self.objective, self._report, self._directions = None, report, directions

    def _objective_of(self, metrics: dict[str, Any]) -> Any:
        return checked_objective(self.compute_objective(dict(metrics)), self._directions)

    def report_evaluation(self, metrics: dict[str, Any]) -> None:
        """After each evaluation of the loop: in a search, report the objective. Collective there.

        Raises:
            TrialPruned: rank 0's search gives the trial up; on all ranks.
        """
        if self.hp_search_backend is None or self._trial is None:
            return
        self.objective = self._objective_of(metrics)
        given_up = False
        if self._report is not None:
            given_up = self._report(self.objective, self.state.global_step, dict(metrics))
        if distributed.agree(torch.tensor([int(given_up)]))[0]:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            raise TrialPruned(f"{self._trial.where} was given up after step {self.state.global_step}")

"""The state of a new run, and the callbacks that are told about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
from ds_trainer.callbacks.integrations import reporting_callbacks
from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.training.overrides.base import TrainerBase


class RunState(TrainerBase):
    """Creates the state of a run and registers its callbacks."""

    def new_state(self, plan: RunPlan | None = None) -> TrainerState:
        """The state of a new run."""
        state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        if (trial := self.trials.trial) is not None:
            state.is_hyper_param_search = True
            state.trial_name, state.trial_params = trial.name, dict(trial.params)
        if plan is not None:
            state.max_steps, state.num_train_epochs = plan.max_steps, plan.epochs
            state.train_batch_size = self.args.per_device_train_batch_size
            state.compute_steps(self.args, plan.max_steps)
        return state

    def add_callbacks(self, user_callbacks: Sequence[Any]) -> None:
        """Add the default callbacks, those of ``report_to``, and the user's, in the order of transformers."""
        args = self.args
        progress = PrinterCallback if args.disable_tqdm else ProgressCallback
        trackers = reporting_callbacks(
            args.report_to,
            lambda: self.compiled.to_dict(),
            main_process=self.is_world_process_zero(),
            first_of_machine=self.is_local_process_zero(),
        )
        handler = self.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.own = [MetricsFileCallback()]
        for callback in (DefaultFlowCallback, *trackers, *user_callbacks, progress):
            handler.add_callback(callback)
        self.events.user_callbacks = bool(user_callbacks)

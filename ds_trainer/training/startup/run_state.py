"""The state of a new run, and the callbacks that are told about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
from ds_trainer.callbacks.integrations import reporting_callbacks
from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.training.loop.run_plan import RunPlan

if TYPE_CHECKING:
    from ds_trainer.training.assembly import Assembly


def new_state(assembly: Assembly, plan: RunPlan | None = None) -> TrainerState:
    """The state of a new run."""
    trainer, args = assembly.trainer, assembly.args
    state = TrainerState(
        is_local_process_zero=trainer.is_local_process_zero(), is_world_process_zero=trainer.is_world_process_zero()
    )
    if (trial := assembly.trials.trial) is not None:
        state.is_hyper_param_search = True
        state.trial_name, state.trial_params = trial.name, dict(trial.params)
    if plan is not None:
        state.max_steps, state.num_train_epochs = plan.max_steps, plan.epochs
        state.train_batch_size = args.per_device_train_batch_size
        state.compute_steps(args, plan.max_steps)
    return state


def add_callbacks(assembly: Assembly, user_callbacks: Sequence[Any]) -> None:
    """Add the default callbacks, those of ``report_to``, and the user's, in the order of transformers."""
    trainer, args, handler = assembly.trainer, assembly.args, assembly.events.handler
    trackers = reporting_callbacks(
        args.report_to,
        lambda: assembly.compiled.to_dict(),
        main_process=trainer.is_world_process_zero(),
        first_of_machine=trainer.is_local_process_zero(),
    )
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
    handler.own = [MetricsFileCallback()]
    progress = PrinterCallback if args.disable_tqdm else ProgressCallback
    for callback in (DefaultFlowCallback, *trackers, *user_callbacks, progress):
        handler.add_callback(callback)
    assembly.events.user_callbacks = bool(user_callbacks)

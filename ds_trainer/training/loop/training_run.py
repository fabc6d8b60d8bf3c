"""``TrainingRun``: the objects that the components of one training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.loop.loss_computation import LossComputation
from ds_trainer.training.loop.run_plan import RunPlan

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One training with its engine. ``Trainer.train`` creates it for the loop and the checkpointer.

    Attributes:
        events: arguments, state, control and callbacks.
        config: the compiled DeepSpeed configuration.
        batch_plan: sizes of micro-batch, global batch and accumulation.
        plan: length of the run.
        model: the module.
        engine: the engine with the module.
        optimizer, lr_scheduler: those in use.
        loader: micro-batches of this replica.
        processing_class: saved with the weights.
        device: the device of this rank.
        fingerprint: the compatibility fingerprint (:func:`compatibility_of`).
        log: logs values (``Trainer.log``).
        losses: computes the losses; what they are the mean of is part of a checkpoint.
        final_metrics: further metrics of the whole training: loading of the model, memory.
    """

    events: TrainingEvents
    config: CompiledConfig
    batch_plan: BatchPlan
    plan: RunPlan
    model: nn.Module
    engine: TrainingEngine
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    loader: Any
    processing_class: Any
    device: torch.device
    fingerprint: dict[str, Any]
    log: Callable[..., None]
    final_metrics: Callable[[], dict[str, Any]]
    losses: LossComputation

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process of the job."""
        return self.events.state.is_world_process_zero

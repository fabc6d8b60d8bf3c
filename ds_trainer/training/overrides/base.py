"""``TrainerBase``: the attributes that the overridable methods of the Trainer share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.monitor.memory_tracker import MemoryTracker
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.engines import Engines
from ds_trainer.training.hub.publisher import HubPublisher
from ds_trainer.training.loop.loss_computation import LossComputation
from ds_trainer.training.loop.loss_rule import LossRule
from ds_trainer.training.loop.run_plan import batch_plan_of
from ds_trainer.training.loop.step import MicroBatchRunner
from ds_trainer.training.model.label_smoothing import LabelSmoother
from ds_trainer.training.resume.checkpointer import Checkpointer
from ds_trainer.training.search.trial_runner import TrialRunner
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.training.telemetry import Telemetry
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class TrainerBase:
    """Attributes that :class:`ds_trainer.training.trainer.Trainer` sets before any overridable method is called.

    Each component owns its state: ``events`` (arguments, state, control, callbacks), ``engines``, ``losses``,
    ``telemetry``, ``publisher`` (the Hub), ``trials`` (hyperparameter search), ``memory_tracker``.
    """

    events: TrainingEvents
    engines: Engines
    losses: LossComputation
    telemetry: Telemetry
    publisher: HubPublisher
    trials: TrialRunner
    memory_tracker: MemoryTracker
    micro_batches: MicroBatchRunner | None = None
    """Runs forward and backward passes; exists as long as the engine."""
    checkpointer: Checkpointer | None = None
    """Saves and restores the current or last training."""

    device: torch.device
    model: nn.Module
    model_wrapped: nn.Module
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    data_collator: Callable[[list[Any]], Any]
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    model_init: Callable[..., Any] | None
    peft_config: Any
    label_names: list[str]
    can_return_loss: bool
    label_smoother: LabelSmoother | None
    layout: ParallelLayout
    compiled: CompiledConfig
    accelerator: TrainerAccelerator
    overridden: frozenset[str]
    """Names of the methods that a subclass overrides."""
    optimizer: Any
    lr_scheduler: Any
    user_optimizers: tuple[Any, Any]
    """``optimizers`` of the constructor."""
    # Class, arguments and origin of ``optimizer_cls_and_kwargs``.
    optimizer_class: tuple[type[torch.optim.Optimizer], dict[str, Any], str] | None
    is_in_train: bool

    # -- arguments, state, control, callbacks -------------------------------------------------------------------------

    @property
    def args(self) -> TrainingArguments:
        """The training arguments; during a trial, those of the trial."""
        return self.events.args

    @args.setter
    def args(self, value: TrainingArguments) -> None:
        self.events.args = value

    @property
    def state(self) -> TrainerState:
        """The state that callbacks see."""
        return self.events.state

    @state.setter
    def state(self, value: TrainerState) -> None:
        self.events.state = value

    @property
    def control(self) -> TrainerControl:
        """The decisions of the callbacks."""
        return self.events.control

    @control.setter
    def control(self, value: TrainerControl) -> None:
        self.events.control = value

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks."""
        return self.events.handler

    @property
    def saved_processing_class(self) -> Any:
        """What is saved beside the weights: ``processing_class``, else the tokenizer of the collator, or None."""
        return (
            getattr(self.data_collator, "tokenizer", None) if self.processing_class is None else self.processing_class
        )

    @property
    def optimizer_cls_and_kwargs(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
        """The argument of this name of the constructor."""
        return None if self.optimizer_class is None else self.optimizer_class[:2]

    @property
    def neftune_noise_alpha(self) -> float | None:
        """The scale of NEFTune's noise in the next training."""
        return self.args.neftune_noise_alpha

    @neftune_noise_alpha.setter
    def neftune_noise_alpha(self, value: float | None) -> None:
        self.args.neftune_noise_alpha = value

    # -- parallelism --------------------------------------------------------------------------------------------------

    @property
    def batch_plan(self) -> BatchPlan:
        """Batch arithmetic of training."""
        return batch_plan_of(self.args, self.layout)

    @property
    def groups(self) -> ParallelGroups:
        """The process groups of the layout. Collective at the first call; needs a process group."""
        return parallel_groups(self.layout)

    @property
    def engine(self) -> TrainingEngine:
        """The engine of the training. Raises ConfigError before the first ``train``."""
        return self.engines.training

    @property
    def deepspeed(self) -> Any:
        """The engine of DeepSpeed, as ``model_wrapped`` is; None before the first ``train``."""
        engine = self.engines.training_or_none
        return None if engine is None else engine.deepspeed

    @property
    def loss_rule(self) -> LossRule:
        """Turns the loss of a micro-batch into its contribution to the loss of the global batch."""
        return self.losses.rule

    @property
    def sequence_sharder(self) -> SequenceSharder | None:
        """Shards the sequences of a replica's batch over its ranks; None without sequence sharding."""
        return self.losses.sharder

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the loss is a sum divided by ``num_items_in_batch``; set it to False for a mean."""
        return self.loss_rule.normalized

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self.losses.rule = LossRule(self.loss_rule.count, value, self.loss_rule.auxiliary)

    loss_is_scaled_for_ga: bool | None = None
    """What the losses of ``compute_loss`` are, for subclasses that compute their own: True if those of a step's
    micro-batches add up to the loss of a replica, False if each is a mean. None: found out at the first step."""

    @property
    def reads_logits(self) -> bool:
        """Whether code other than the loss of the model may read the logits of a training step."""
        user = self.compute_loss_func is not None or bool({"compute_loss", "training_step"} & self.overridden)
        return user or self.label_smoother is not None

    def create_accelerator_and_postprocess(self) -> None:
        """Set ``self.accelerator`` and the flags that scripts read. Called when the configuration is compiled."""
        self.accelerator = TrainerAccelerator(
            self.layout,
            self.args,
            self.compiled,
            lambda: self.engines.training_or_none,
            lambda: join_ranks(self.args),
            lambda: self.model,
        )
        pinned = self.args.dataloader_pin_memory
        if self.accelerator.non_blocking and not pinned:
            logger.warning(
                "accelerator_config: non_blocking=True has no effect without dataloader_pin_memory=True: copies from "
                "memory that is not pinned wait for the device."
            )
        self.is_deepspeed_enabled = True
        self.is_fsdp_enabled = False

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the whole job."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.args.local_process_index == 0

    @property
    def output_dir(self) -> Path:
        """The output directory of the run."""
        return Path(str(self.args.output_dir))

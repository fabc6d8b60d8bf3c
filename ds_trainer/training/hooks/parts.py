"""``Parts``: the attributes of the Trainer that its hooks share, with their types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.sequence_cut import SequenceCut
from ds_trainer.engine.evaluation_engine import EvaluationEngine
from ds_trainer.engine.loading.report import LoadReport
from ds_trainer.engine.process_group import start_process_group
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.monitor.memory_tracker import MemoryTracker, Stage
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.accelerator.trainer_accelerator import TrainerAccelerator
from ds_trainer.training.label_smoothing import LabelSmoother
from ds_trainer.training.loading.model_argument import MeasuredLoad
from ds_trainer.training.loss import LossRule
from ds_trainer.training.weight_check import WeightCheck
from ds_trainer.utils import distributed
from ds_trainer.utils.accelerate_state import attach_accelerate
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import watch_peers


class Parts:
    """What :class:`ds_trainer.training.trainer.Trainer` sets before any hook is called."""

    args: TrainingArguments
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
    label_smoother: LabelSmoother | None
    layout: ParallelLayout
    compiled: CompiledConfig
    accelerator: TrainerAccelerator
    loss_rule: LossRule
    sequence_cut: SequenceCut | None
    """How the sequences of a replica's batch are cut over its ranks; None where they stay whole."""
    _uncut: list[str]
    """Why they stay whole although the layout asks for a cut: then the model can be evaluated, but not trained."""
    optimizer: Any
    lr_scheduler: Any
    _given_optimizers: tuple[Any, Any]
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    is_in_train: bool
    current_gradient_accumulation_steps: int = 1
    stage: Stage
    """The stage of the run whose memory is being measured; an inert one without ``skip_memory_metrics=False``."""
    _memory_tracker: MemoryTracker
    weight_check: WeightCheck
    """Whether the weights were what the model's files hold."""
    _engine: TrainingEngine | None
    _evaluation_engine: EvaluationEngine | None = None
    load_report: LoadReport | None = None
    """What the last load of the weights from files took; None where there was none."""
    # Class, arguments and origin of an optimizer that neither arguments nor file describe.
    _optimizer_class: tuple[type[torch.optim.Optimizer], dict[str, Any], str] | None
    _group_members: list[list[Any]] | None = None

    @contextmanager
    def _measured_load(self) -> Iterator[None]:
        """Inside, the model gets its weights, if it is on meta; that is measured. Collective."""
        load = MeasuredLoad()
        with load.of(self.model):
            yield
        if load.report is not None:
            self.load_report = load.report

    @property
    def engine(self) -> TrainingEngine:
        """The engine; it exists from the first ``train`` on. Raises ConfigError before."""
        if self._engine is None:
            raise ConfigError("There is no engine yet: it is built by train().")
        return self._engine

    @property
    def groups(self) -> ParallelGroups:
        """The process groups of the layout; needs :meth:`_join_ranks`. Collective at the first call."""
        return parallel_groups(self.layout)

    def gradient_group(self) -> ProcessGroup | None:
        """The ranks whose shares add up to a sum over the global batch; None for all, or without a process group."""
        return self.groups.gradient if distributed.world_size() > 1 else None

    def replicas_group(self) -> ProcessGroup | None:
        """The ranks that hold other samples than this one, and itself; None without a process group."""
        return self.groups.dp if distributed.world_size() > 1 else None

    def create_accelerator_and_postprocess(self) -> None:
        """Set ``self.accelerator``, and what scripts ask about it. Called once, when the configuration is compiled."""
        self.accelerator = TrainerAccelerator(
            self.layout, self.args, self.compiled, lambda: self._engine, self._join_ranks, lambda: self.model
        )
        self.is_deepspeed_enabled = True
        self.is_fsdp_enabled = False

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the whole job."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.args.local_process_index == 0

    def _join_ranks(self) -> None:
        start_process_group(self.args.device_type, self.args.ddp_timeout_delta)
        attach_accelerate(self.args.device_type)  # for the functions of accelerate that scripts call
        watch_peers()

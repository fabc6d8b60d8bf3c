"""``TrainerAccelerator``: the object behind ``trainer.accelerator``.

It is not an ``accelerate.Accelerator``: there is one DeepSpeed engine, and the Trainer owns it. The members that
scripts and subclasses use have the names, arguments and results of accelerate's class; any other use raises an error
with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.accelerator.prepared_objects import PreparedObjects
from ds_trainer.accelerator.views import (
    DeepSpeedPluginView,
    EngineView,
    GradientStateView,
    StateView,
    mixed_precision,
)
from ds_trainer.arguments.accelerator_config import AcceleratorConfig, accelerator_config
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

# Members of accelerate's class that are not supported, and what to use instead.
ALTERNATIVES = {
    "clip_grad_value_": "DeepSpeed clips by norm: set max_grad_norm.",
    "get_tracker": "Trackers are callbacks: set report_to.",
    "init_trackers": "Trackers are callbacks: set report_to.",
    "join_uneven_inputs": "Ranks stay in lockstep: the loaders handle uneven batches.",
    "load_state": "Use trainer.train(resume_from_checkpoint=...).",
    "log": "Use trainer.log(...).",
    "profile": "Use torch.profiler.",
    "register_for_checkpointing": "Put state in a callback with ExportableState: it is saved and restored.",
    "save_state": "Use trainer.save_checkpoint().",
    "unscale_gradients": "DeepSpeed holds the loss scale; trainer.engine.grad_norm() is unscaled.",
}


class TrainerAccelerator(PreparedObjects):
    """The object that scripts for Hugging Face's Trainer use as ``self.accelerator``.

    Args:
        layout: the parallel layout.
        args: the Trainer's arguments.
        compiled: the DeepSpeed configuration.
        get_engine: returns the current engine; None before ``train``.
        join_ranks: starts the process group; called by the first method that needs it.
        get_model: returns the model that the engine trains or will train.

    The constructor starts nothing: no process group, no engine, and not accelerate's own state.

    Attributes:
        state: process, device, precision, ``deepspeed_plugin``, as in accelerate's ``AcceleratorState``.
        gradient_state: ``sync_gradients`` and ``num_steps`` of our loop, ``remainder`` of accelerate's loaders.
        deepspeed_plugin: ``deepspeed_config`` (a copy), ``zero_stage``, ``hf_ds_config``.
        trackers: empty; trackers are callbacks.
        scaler: None; DeepSpeed holds the loss scale.
        native_amp: False.
        is_fsdp2: False.
    """

    scaler = None
    native_amp = False
    is_fsdp2 = False

    def __init__(
        self,
        layout: ParallelLayout,
        args: TrainingArguments,
        compiled: CompiledConfig,
        get_engine: Callable[[], TrainingEngine | None],
        join_ranks: Callable[[], None],
        get_model: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        super().__init__(layout, args, join_ranks, get_engine, get_model)
        self._compiled = compiled
        self.state = StateView(self)
        self.gradient_state = GradientStateView(self)
        self.deepspeed_plugin = DeepSpeedPluginView(compiled)
        self.trackers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        remedy = ALTERNATIVES.get(name, f"It has {', '.join(members())}.")
        raise AttributeError(f"trainer.accelerator has no {name!r}: it is ds_trainer's, not accelerate's. {remedy}")

    # -- what runs ------------------------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> Any:
        """accelerate's ``DistributedType.DEEPSPEED``, also for one rank."""
        from accelerate.utils import DistributedType

        return DistributedType.DEEPSPEED

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return mixed_precision(self._compiled)

    @property
    def parallelism_config(self) -> Any:
        """accelerate's ``ParallelismConfig`` with the sizes of the layout.

        Raises:
            ConfigError: context and sequence parallelism together, which accelerate cannot describe.
        """
        from accelerate import ParallelismConfig

        layout = self._layout
        if layout.cp > 1 and layout.sp > 1:
            raise ConfigError(
                f"accelerate's ParallelismConfig cannot combine cp_size={layout.cp} and sp_size={layout.sp}. Use "
                "trainer.layout instead."
            )
        copies = self.deepspeed_plugin.zero_stage == 0 and layout.replica_size == 1
        return ParallelismConfig(
            dp_replicate_size=layout.dp if copies else 1,
            dp_shard_size=1 if copies else layout.dp,
            tp_size=layout.tp,
            cp_size=layout.cp,
            cp_backend="torch",
            sp_size=layout.sp,
            sp_backend="deepspeed",
        )

    @property
    def deepspeed_engine_wrapped(self) -> EngineView | None:
        """The DeepSpeed engine under ``.engine``; None before ``train``."""
        engine = self.get_engine()
        return None if engine is None else EngineView(engine.deepspeed, self.backward)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full optimizer step."""
        return self._args.gradient_accumulation_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its optimizer step."""
        engine = self.get_engine()
        return True if engine is None else engine.is_last

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of an fp16 overflow."""
        engine = self.get_engine()
        return engine is not None and not engine.deepspeed.was_step_applied()

    @property
    def project_dir(self) -> str:
        """The output directory."""
        return str(self._args.output_dir)

    # -- accelerator_config ---------------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """Whether batch sizes are those of all replicas together (``accelerator_config``)."""
        return self._settings.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the loaders of :meth:`prepare` for all (``accelerator_config``); None: streams only."""
        return self._settings.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether loaders of :meth:`prepare` repeat samples to fill the last batch (``accelerator_config``)."""
        return self._settings.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._args.accelerator_config = replace(self._settings, even_batches=value)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of loaders of :meth:`prepare` follows from seed and epoch (``accelerator_config``)."""
        return self._settings.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether loaders of :meth:`prepare` copy to the device asynchronously (``accelerator_config``)."""
        return self._settings.non_blocking

    @property
    def _settings(self) -> AcceleratorConfig:
        return accelerator_config(self._args)

    # -- a step ---------------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, *, scale_wrt_gas: bool | None = None, retain_graph: bool = False, **ignored: Any
    ) -> None:
        """Back-propagate the loss of a micro-batch, as a ``training_step`` written for transformers does.

        Gradients are averaged over the ranks and summed over the micro-batches of the step. The loss that
        ``compute_loss`` returns for ``num_items_in_batch`` is scaled for this average. A dummy counts as zero.

        Args:
            loss: scalar; the mean over this rank's micro-batch.
            scale_wrt_gas: divide by the micro-batches of a full step. None: if the step returns a loss that is divided
                by them, although this one is not (:mod:`ds_trainer.training.loop.own_step`).
            retain_graph: keep the graph for another pass; not with ZeRO 3.
            ignored: keywords of other engines, such as ``learning_rate``.

        Raises:
            ConfigError: there is no engine yet.
        """
        engine = self.get_engine()
        if engine is None:
            raise ConfigError("accelerator.backward: there is no engine yet; it is built by train().")
        if scale_wrt_gas is None and engine.passes is not None:
            scale_wrt_gas = engine.passes.divides_next(loss)
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps
        if self._dummy:
            loss = loss * 0.0
        engine.backward_mean(loss, retain_graph)

    def loss_contribution(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss contribution of a ``training_step``'s result, which the loop sums over ranks."""
        return torch.zeros_like(loss) if self._dummy else loss / self._layout.seq_data_parallel_size

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """The gradient norm of the last optimizer step; DeepSpeed clips in the step itself, by ``max_grad_norm``.

        If a ``training_step`` updates the weights itself, its next update is clipped.

        Args:
            parameters: ignored; the norm is that of the trained model.
            max_norm: equal to ``max_grad_norm``, or infinity to read the norm only.
            norm_type: must be 2.

        Returns:
            A scalar; None before the first step.

        Raises:
            ConfigError: the bound or norm differs from the engine's.
        """
        bound = self.deepspeed_plugin.gradient_clipping
        if norm_type != 2 or not (isinf(max_norm) or max_norm == bound):
            raise ConfigError(
                f"accelerator.clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}), but DeepSpeed clips the "
                f"2-norm: {self._compiled.describe('gradient_clipping')}. Set max_grad_norm={max_norm} instead."
            )
        engine = self.get_engine()
        if engine is not None:
            engine.updates.clips = True
        norm = None if engine is None else engine.grad_norm()
        return None if norm is None or norm != norm else torch.tensor(norm, device=self.device)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """The precision of forward passes outside the engine: ``torch.autocast`` if the engine uses it too.

        A bf16 or fp16 engine casts weights and inputs itself and needs no context.

        Args:
            autocast_handler: accelerate's ``AutocastKwargs``: ``enabled`` and ``cache_enabled``.
        """
        if self._compiled.precision.autocast is None:
            return nullcontext()
        return torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=getattr(autocast_handler, "enabled", True),
            cache_enabled=getattr(autocast_handler, "cache_enabled", True),
        )

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """An empty context: the Trainer's loop decides which micro-batches form a step."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """An empty context: the engine reduces gradients as its ZeRO stage requires; the result is the same."""
        return nullcontext()

    def end_training(self) -> None:
        """Wait for all ranks; callbacks finish the trackers."""
        if distributed.is_initialized():
            self.wait_for_everyone()


def members() -> list[str]:
    """Names of the members of :class:`TrainerAccelerator`."""
    instance = ("state", "gradient_state", "deepspeed_plugin", "trackers")
    return sorted([name for name in dir(TrainerAccelerator) if not name.startswith("_")] + list(instance))

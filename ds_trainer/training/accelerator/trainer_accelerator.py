"""``TrainerAccelerator``: the object behind ``trainer.accelerator``.

It is no ``accelerate.Accelerator``: one DeepSpeed engine exists and the Trainer owns it. What scripts and subclasses
call has the names, arguments and results of accelerate's class; what could only be wrong here is refused with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isinf
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.accelerator.preparation import Preparation
from ds_trainer.training.accelerator.views import (
    DeepSpeedPluginView,
    EngineView,
    GradientStateView,
    StateView,
    mixed_precision,
)
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

# Members of accelerate's class that have no meaning here, and what to use instead.
ELSEWHERE = {
    "clip_grad_value_": "DeepSpeed clips by norm: set max_grad_norm.",
    "get_tracker": "Trackers are callbacks: set report_to.",
    "init_trackers": "Trackers are callbacks: set report_to.",
    "join_uneven_inputs": "Ranks stay in step: ragged batches are handled by the loaders.",
    "load_state": "Use trainer.train(resume_from_checkpoint=...).",
    "log": "Use trainer.log(...).",
    "profile": "Use torch.profiler.",
    "register_for_checkpointing": "Put state into a callback with ExportableState: it is saved and restored.",
    "save_state": "Use trainer.save_checkpoint().",
    "unscale_gradients": "DeepSpeed holds the loss scale; trainer.engine.grad_norm() is unscaled.",
}


class TrainerAccelerator(Preparation):
    """What scripts of Hugging Face's Trainer call as ``self.accelerator``.

    Args:
        layout: where every rank stands.
        args: the Trainer's arguments.
        compiled: what DeepSpeed is told.
        get_engine: the engine of the moment; None before ``train``.
        join_ranks: starts the process group; called by the first method that needs it.
        get_model: the model that the engine trains or will train.

    Nothing is started here: neither a process group, nor an engine, nor accelerate's own state.

    Attributes:
        state: process, device, precision, ``deepspeed_plugin``, as in accelerate's ``AcceleratorState``.
        gradient_state: ``sync_gradients`` and ``num_steps`` of our loop, ``remainder`` of accelerate's loaders.
        deepspeed_plugin: ``deepspeed_config`` (a copy), ``zero_stage``, ``hf_ds_config``.
        trackers: empty; trackers are callbacks.
        scaler: None; DeepSpeed holds the loss scale.
        native_amp: False.
        even_batches: True, for loaders of scripts.
        split_batches: False; batch sizes are of one rank.
        is_fsdp2: False.
    """

    scaler = None
    native_amp = False
    even_batches = True
    split_batches = False
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
        self._went_backward = False
        self.state = StateView(self)
        self.gradient_state = GradientStateView(self)
        self.deepspeed_plugin = DeepSpeedPluginView(compiled)
        self.trackers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        remedy = ELSEWHERE.get(name, f"It has {', '.join(members())}.")
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
            ConfigError: context and sequence parallelism together, which accelerate has no words for.
        """
        from accelerate import ParallelismConfig

        layout = self._layout
        if layout.cp > 1 and layout.sp > 1:
            raise ConfigError(
                f"accelerate's ParallelismConfig cannot say cp_size={layout.cp} with sp_size={layout.sp}. Ask "
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
        engine = self._get_engine()
        return None if engine is None else EngineView(engine.deepspeed, self.backward)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full optimizer step."""
        return self._args.gradient_accumulation_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its optimizer step."""
        engine = self._get_engine()
        return True if engine is None else bool(engine.deepspeed.is_gradient_accumulation_boundary())

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because fp16 overflowed."""
        engine = self._get_engine()
        return engine is not None and not engine.deepspeed.was_step_applied()

    @property
    def project_dir(self) -> str:
        """The output directory."""
        return str(self._args.output_dir)

    # -- a step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool = True, retain_graph: bool = False) -> None:
        """Back-propagate the *mean* loss of a micro-batch, as a ``training_step`` written for transformers does.

        Gradients are averaged over the ranks and summed over the micro-batches of the step. What ``compute_loss``
        returns for ``num_items_in_batch`` is made for this average. A filler counts as zero.

        Args:
            loss: scalar; the mean over this rank's micro-batch.
            scale_wrt_gas: divide by the micro-batches of a full step; False where the loss is divided already.
            retain_graph: keep the graph for another pass.

        Raises:
            ConfigError: there is no engine yet.
        """
        engine = self._get_engine()
        if engine is None:
            raise ConfigError("accelerator.backward: there is no engine yet; it is built by train().")
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps
        if self._filler:
            loss = loss * 0.0
        engine.backward_mean(loss, retain_graph)
        self._went_backward = True

    @contextmanager
    def batch(self, inputs: Any) -> Iterator[None]:
        """The batch that is worked on, told by the loop: what is computed from a filler counts for nothing."""
        self._went_backward = False
        with super().batch(inputs):
            yield

    def share_of(self, loss: torch.Tensor) -> torch.Tensor:
        """What a ``training_step`` returned, as the loop adds it up over ranks.

        Where the step went through :meth:`backward`, the loss is made for an average over the ranks.
        """
        if not self._went_backward:
            return loss
        return torch.zeros_like(loss) if self._filler else loss / self._layout.gradient_ranks

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """The gradient norm of the last optimizer step; DeepSpeed clips in the step itself, by ``max_grad_norm``.

        Args:
            parameters: those of the trained model.
            max_norm: as ``max_grad_norm``, or infinity to ask only.
            norm_type: 2.

        Returns:
            A scalar; None before the first step.

        Raises:
            ConfigError: another bound or norm than the engine's.
        """
        bound = self.deepspeed_plugin.gradient_clipping
        if norm_type != 2 or not (isinf(max_norm) or max_norm == bound):
            raise ConfigError(
                f"accelerator.clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}), but DeepSpeed clips the "
                f"2-norm: {self._compiled.said('gradient_clipping')}. Set max_grad_norm={max_norm} instead."
            )
        engine = self._get_engine()
        norm = None if engine is None else engine.grad_norm()
        return None if norm is None or norm != norm else torch.tensor(norm, device=self.device)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """The number format of forward passes outside the engine: ``torch.autocast`` where the engine uses it too.

        A bf16 or fp16 engine casts weights and inputs itself and needs no context.

        Args:
            autocast_handler: accelerate's ``AutocastKwargs``: ``enabled`` and ``cache_enabled``.
        """
        if not self._compiled.get("torch_autocast.enabled"):
            return nullcontext()
        return torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=getattr(autocast_handler, "enabled", True),
            cache_enabled=getattr(autocast_handler, "cache_enabled", True),
        )

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """An empty context: which micro-batches make a step is decided by the Trainer's loop."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """An empty context: the engine reduces gradients as its ZeRO stage needs; the result is the same."""
        return nullcontext()

    def end_training(self) -> None:
        """Wait for everyone; trackers end with the callbacks."""
        if distributed.is_initialized():
            self.wait_for_everyone()


def members() -> list[str]:
    """Names of what :class:`TrainerAccelerator` has."""
    instance = ("state", "gradient_state", "deepspeed_plugin", "trackers")
    return sorted([name for name in dir(TrainerAccelerator) if not name.startswith("_")] + list(instance))

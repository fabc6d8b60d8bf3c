"""``TrainingEngine``: builds a DeepSpeed engine for training and compensates for its loss scaling.

DeepSpeed changes a loss in two ways: ``engine.backward`` divides it by the accumulation steps (disabled here), and the
reduction *averages* gradients over the data-parallel ranks. The gradient we want is a plain sum over all micro-batches
of all ranks, whose losses are already divided by the item count of the whole global batch. So every loss is multiplied
by the number of ranks that DeepSpeed averages over, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.backward_passes import BackwardPasses, unusable, without_backward
from ds_trainer.engine.compilation import CompileOptions, compile_module, remove_compilation
from ds_trainer.engine.evaluation_engine import follow_modes
from ds_trainer.engine.finite_step import (
    SkippedStepError,
    attributes,
    enable_overflow_checks,
    scales_loss,
    skipped_update,
)
from ds_trainer.engine.gradient_norm import reduce_norm_once
from ds_trainer.engine.gradient_partitions import own_gradient_partition
from ds_trainer.engine.host_time import spare_host_time
from ds_trainer.engine.loading.creation_memory import bounded_creation, check_creation
from ds_trainer.engine.loading.placement import loading_weights
from ds_trainer.engine.loading.transformers_zero3 import end_registrations
from ds_trainer.engine.muon_compilation import compile_muon_when_called
from ds_trainer.engine.optimizer_state_init import repaired_state_init
from ds_trainer.engine.own_updates import OwnUpdates
from ds_trainer.engine.reduction_dtypes import (
    Float32Accumulation,
    accumulates_in_float32,
    deepspeed_settings,
    keep_reduction_dtype,
    reset_autocast,
)
from ds_trainer.engine.reduction_order import reduce_in_fixed_order
from ds_trainer.engine.seen_gradients import seen_gradients
from ds_trainer.engine.tensor_parallel.repairs import skip_input_check
from ds_trainer.engine.tensor_parallel.slices import gradient_norm
from ds_trainer.engine.topology import install_mpu, reset_deepspeed_groups, set_deepspeed_groups, verify_engine_topology
from ds_trainer.engine.unused_parameters import UnusedParameters
from ds_trainer.engine.whole_step import step_all_at_once
from ds_trainer.engine.written_weights import WrittenWeights
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.secrets import register_secrets_of, without_secrets

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from ds_trainer.engine.tensor_parallel.repairs import GradientAgreement
    from ds_trainer.engine.zero3.parts import Zero3Parts


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of DeepSpeed's engine


def loss_factor(loss: torch.Tensor, ranks: int) -> torch.Tensor:
    """``ranks``, or NaN if ``loss`` is not finite: a scalar of the loss's dtype, without a device synchronization.

    Multiplied by this factor, a non-finite loss has a non-finite gradient; otherwise a clamp, a mask or a kernel with a
    custom backward pass might produce a finite one.
    """
    return loss.detach() * 0.0 + ranks


class TrainingEngine:
    """A DeepSpeed engine that sums gradients over the global batch.

    Args:
        model: the module to train, on any device, on the meta device with a weight source
            (:mod:`ds_trainer.engine.loading.weight_source`), or created under ``deepspeed.zero.Init``. ZeRO-3 shards it
            in place, one parameter at a time.
        optimizer: the optimizer over ``model``'s parameters, or parameter groups for the optimizer that DeepSpeed
            builds from ``config``.
        config: the compiled configuration.
        layout: the parallel layout.
        compile_options: how to compile the model. None does not compile it, unless ``config`` enables DeepSpeed's own
            compiler.
        gather_logits: code other than the model's own loss reads the logits of a training step, so tensor parallelism
            gathers them (:mod:`ds_trainer.engine.tensor_parallel.vocab_parallel_head`).

    Attributes:
        before_step: called once before the next :meth:`step`; a background copy of the masters and optimizer states
            uses it to delay the step.
        during_backward: context manager of every backward pass, to measure it.
        unused_parameters: stay as they are in a step.
        reduction_order: reduces gradients in the same order on all ranks; None where DeepSpeed does.
        module_guard: stops all ranks if they are about to run different modules under ZeRO-3; None at other stages.
        guarded: non-finite gradients never reach the weights (:mod:`ds_trainer.engine.finite_step`).
        passes: backward passes that a script runs itself; None if no code of a script runs in a step.
        updates: updates that a script makes itself.
        written: weights that a script may write; None if none of its code runs.
        is_last: whether the micro-batch is the last of its step.
        completes_late: no backward pass completes the reduction, because a script may run another one after it;
            :meth:`complete_gradients` does.

    Needs a process group (:func:`ds_trainer.engine.process_group.start_process_group`).

    Raises:
        ConfigError: DeepSpeed's topology differs from the layout, DeepSpeed partitioned no parameter, or there is no
            weight source for a parameter on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[dict[str, Any]],
        config: CompiledConfig,
        layout: ParallelLayout,
        compile_options: CompileOptions | None = None,
        gather_logits: bool = False,
    ) -> None:
        import deepspeed

        register_secrets_of(config.to_dict())
        self.layout = layout
        self.groups: ParallelGroups = parallel_groups(layout)
        mpu = set_deepspeed_groups(self.groups, config)
        self.stage: int = config.zero_stage
        self.offloads_optimizer = config.offload("optimizer") is not None
        self._clipping: float = config.gradient_clipping
        self.deepspeed: DeepSpeedEngine
        argument = "model_parameters" if isinstance(optimizer, list) else "optimizer"
        self._zero3: Zero3Parts | None = None
        if self.stage == 3:
            from ds_trainer.engine.zero3.parts import Zero3Parts

            self._zero3 = Zero3Parts(model)
        else:
            end_registrations()
        reset_autocast(model)
        compile_muon_when_called()
        spare_host_time()
        placed = loading_weights(model, self.groups, mpu)
        partitioned: AbstractContextManager[None] = nullcontext()
        if layout.tp > 1:
            from ds_trainer.engine.tensor_parallel.partitioning import complete_partitioning

            partitioned = complete_partitioning(self.groups, gather_logits)
        with (
            repaired_state_init(),
            partitioned,
            placed,
            bounded_creation() as spared,
            own_gradient_partition(),
        ):
            keywords = {argument: optimizer, "config": deepspeed_settings(config), "mpu": mpu}
            self.deepspeed, *_ = deepspeed.initialize(model=model, **keywords)
        follow_modes(self.deepspeed)
        check_creation(self.deepspeed.optimizer, spared)
        # DeepSpeed writes this into every checkpoint; it has already read the values that it needs.
        self.deepspeed.config = without_secrets(self.deepspeed.config)
        install_mpu(self.deepspeed, mpu)
        if self._zero3 is not None:
            self._zero3.created(self.deepspeed, self.deepspeed.config)
        skip_input_check(self.deepspeed)
        batches = BatchPlan(layout, config.micro_batch_size, config.gradient_accumulation_steps)
        verify_engine_topology(self.deepspeed, self.groups, batches)
        overlaps = bool(config.get("zero_optimization.overlap_comm", True))
        self.reduction_order = reduce_in_fixed_order(self.deepspeed, overlaps)
        if self._zero3 is not None:
            self._zero3.trains()
        seen = seen_gradients(self.deepspeed, self.reduction_order, layout.seq_data_parallel_size, overlaps)
        by_deepspeed = config.uses_deepspeed_compiler
        self._compiled = bool(by_deepspeed) or compile_options is not None
        if self._zero3 is not None:
            self._zero3.complete(self.deepspeed, self._compiled)
        self.module_guard = None if self._zero3 is None else self._zero3.guard
        self.guarded = True
        enable_overflow_checks(self.deepspeed.optimizer)
        norm = reduce_norm_once(self.deepspeed.optimizer)
        step_all_at_once(self.deepspeed.optimizer, self.groups)
        self.unused_parameters = UnusedParameters(self.deepspeed, self.groups, seen, norm)
        keep_reduction_dtype(self.deepspeed.optimizer, config.precision.autocast is not None)
        self._accumulation = Float32Accumulation(model) if accumulates_in_float32(config) else None
        self.scales_loss = scales_loss(self.deepspeed)
        self.before_step: Callable[[], None] | None = None
        self.during_backward: AbstractContextManager[None] = nullcontext()
        if self._compiled:
            compile_module(self.deepspeed, compile_options)  # DeepSpeed's configuration alone compiles nothing
        self._agreement: GradientAgreement | None = None
        if layout.tp > 1:
            from ds_trainer.engine.tensor_parallel.repairs import GradientAgreement

            self._agreement = GradientAgreement(model, self.groups)
        self.precision = config.precision.dtype
        self._averaged_over = layout.seq_data_parallel_size
        # DeepSpeed computes no gradient norm if it neither shards nor scales (float32 at stage 0).
        self._computes_norm = self.stage == 0 and self.precision == "fp32"
        self._grad_norm: Any = None
        if self._computes_norm:
            self._parameters = [p for p in model.parameters() if p.requires_grad]
            self.deepspeed.clip_fp32_gradients = lambda: None  # complete_gradients does
        self.passes: BackwardPasses | None = None
        self.is_last, self.completes_late, self._complete = True, False, False
        self.updates = OwnUpdates(self)
        self.written: WrittenWeights | None = None

    # -- one optimizer step: begin_micro_batch, forward, backward, ..., complete_gradients, step -------------------

    def allow_own_passes(self, completes_late: bool) -> BackwardPasses:
        """Code of a script runs in each step, and may run backward passes; with ``completes_late`` also after ours."""
        self.passes = BackwardPasses(self.deepspeed, self.stage, self._averaged_over, self.updates)
        self.completes_late = completes_late
        return self.passes

    def follow_written_weights(self) -> None:
        """Lets the masters follow what a script has written into weights since the last update."""
        if self.written is not None:
            self.written.follow()

    def begin_micro_batch(self, last: bool, is_dummy: bool = False) -> None:
        """Announces a micro-batch; with ``last`` its backward pass completes the gradient reduction."""
        self.is_last, self._complete = last, False
        self.deepspeed.set_gradient_accumulation_boundary(last and self.passes is None)
        if self.passes is not None:
            self.passes.begin_micro_batch(is_dummy)
        if self.module_guard is not None:
            step = self.deepspeed.global_steps + 1
            self.module_guard.micro_batch = self.module_guard.micro_batch + 1 if step == self.module_guard.step else 1
            self.module_guard.step = step
        if last and self._accumulation is not None:
            self._accumulation.complete()

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagates ``loss``, a scalar already divided by the item count of the global batch."""
        if not loss.requires_grad or loss.numel() != 1:
            raise unusable(loss)
        ranks = self._averaged_over
        loss = loss * (loss_factor(loss, ranks) if self.guarded else ranks)
        if self.passes is not None:
            self._backward_among_others(loss, retain_graph=False)
            return
        with self.during_backward:
            self.deepspeed.backward(loss, scale_wrt_gas=False)

    def backward_mean(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Back-propagates ``loss``, a scalar whose gradient is averaged over the ranks.

        For training steps that divide by the accumulation themselves, as those written for transformers do.
        ``retain_graph`` keeps the graph for another pass.
        """
        self._backward_among_others(loss * (loss_factor(loss, 1) if self.guarded else 1.0), retain_graph)

    def _backward_among_others(self, loss: torch.Tensor, retain_graph: bool) -> None:
        if not loss.requires_grad or loss.numel() != 1:
            raise unusable(loss)
        if self.passes is None:
            raise ConfigError("accelerator.backward was called outside of an overridden training_step or compute_loss.")
        self.deepspeed.set_gradient_accumulation_boundary(self.is_last and not self.completes_late)
        with self.during_backward, self.passes.running():
            self.deepspeed.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def complete_gradients(self, clip: bool = True) -> None:
        """Completes the gradients of a step, before callbacks may read them and before :meth:`step`. Collective.

        They are reduced, unless the last backward pass has done so. In float32 at stage 0, where DeepSpeed computes no
        norm, they are clipped too, with ``clip``.
        """
        if self._complete or self.updates.done:
            return
        self._complete = True
        self.deepspeed.set_gradient_accumulation_boundary(True)
        if self.completes_late and self.stage >= 2:
            if not self.updates.pending:
                raise without_backward(self.stage)
            self.deepspeed.optimizer.finalize_gradient_accumulation_boundary()
        elif self.completes_late:
            if self.stage == 1 and hasattr(self.deepspeed.optimizer, "setup_buckets"):
                self.deepspeed.optimizer.setup_buckets()
            self.deepspeed.allreduce_gradients()
        if self._computes_norm:
            self._grad_norm = gradient_norm(self._parameters, self.groups)
            if self._clipping > 0 and clip:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clipping, self._grad_norm)

    def step(self, skip_update: bool = False, clip: bool = True) -> bool:
        """Updates the weights and clears the gradients, the same on all ranks.

        Args:
            skip_update: clear the gradients without an update.
            clip: clip the gradients, if the configuration says so.

        Returns:
            Whether the weights were updated. False with ``skip_update``, or if the gradient was not finite (in fp16 it
            may have overflowed, which lowers the loss scale).

        Raises:
            ConfigError: in the first step, if the gradients of a replicated parameter differ across tensor-parallel
                ranks.
            SkippedStepError: this version of DeepSpeed applies a step that must be skipped.
        """
        if (by_script := self.updates.applied()) is not None:
            return by_script
        optimizer: Any = self.deepspeed.optimizer
        self.follow_written_weights()
        if self.before_step is not None:
            self.before_step()
            self.before_step = None
        self.complete_gradients(clip)
        if self._agreement is not None and self._agreement.check(self.deepspeed.device):
            self._agreement = None
        if self._computes_norm:
            skip_update = skip_update or (self.guarded and not bool(self._grad_norm.isfinite()))
        with ExitStack() as stack:
            stack.enter_context(self.unused_parameters.applied())
            stack.enter_context(skipped_update(optimizer) if skip_update else nullcontext())
            if not clip and hasattr(optimizer, "clip_grad"):
                stack.enter_context(attributes(optimizer, {"clip_grad": 0.0}))
            self.deepspeed.step()
        self.updates.pending = False
        if self.written is not None:
            self.written.note()
        applied = self.deepspeed.was_step_applied()
        if applied and skip_update:
            raise SkippedStepError
        return applied

    def drop_step(self) -> None:
        """Clears the gradients of a step that will be run again; nothing else changes. Collective."""
        counters = {name: getattr(self.deepspeed, name) for name in _COUNTERS}
        self.step(skip_update=True)
        vars(self.deepspeed).update(counters)

    def grad_norm(self) -> float:
        """2-norm of the last step's gradient over all ranks, before clipping. May synchronize the device."""
        norm = self.norm_of_step()
        return float("nan") if norm is None else float(norm)

    def norm_of_step(self) -> Any:
        """As :meth:`grad_norm`, where DeepSpeed keeps it: a scalar on the device, a number, or None."""
        return self._grad_norm if self._computes_norm else self.deepspeed.get_global_grad_norm()

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed wraps; a schedule that changes its ``param_groups`` takes effect."""
        return self.deepspeed.basic_optimizer

    @property
    def deepspeed_schedule(self) -> Any:
        """The schedule that DeepSpeed built from ``config`` and advances in :meth:`step`, or None."""
        return self.deepspeed.lr_scheduler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """DeepSpeed's wrapper of the optimizer; it has the same ``param_groups``."""
        return self.deepspeed.optimizer

    def save_state(self, directory: Path, tag: str) -> None:
        """Writes the model and optimizer shards of all ranks to ``directory/tag``. Collective."""
        self.deepspeed.save_checkpoint(str(directory), tag=tag, save_latest=False)

    def load_state(self, directory: Path, tag: str) -> None:
        """Reads a checkpoint that :meth:`save_state` wrote with the same layout and ZeRO stage. Collective.

        Raises:
            ConfigError: DeepSpeed found nothing to load.
        """
        self.deepspeed._config.load_universal_checkpoint = False  # as a file may ask for; save_state writes none
        path, _ = self.deepspeed.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise ConfigError(f"{directory / tag} contains no state that DeepSpeed can load for this layout.")

    def close(self) -> None:
        """Frees memory and removes hooks. An unsharded module stays usable."""
        module = self.deepspeed.module
        self.updates.close()
        self.unused_parameters.close()
        if self._accumulation is not None:
            self._accumulation.close()
        if self._zero3 is not None:
            self._zero3.close()
        self.deepspeed.destroy()
        if self._zero3 is not None:
            self._zero3.release(module)
        reset_deepspeed_groups()
        if self._compiled:
            remove_compilation(module)

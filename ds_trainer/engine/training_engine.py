"""``TrainingEngine``: the one place that builds a DeepSpeed engine and knows its habits.

What DeepSpeed does to a loss, and how it is undone: ``engine.backward`` divides by the accumulation steps (switched
off here) and the reduction *averages* gradients over the data-parallel ranks. The gradient that we want is a plain sum
over all micro-batches of all ranks, whose losses are already divided by the item count of the whole global batch. So
every loss is multiplied by the number of ranks that are averaged over, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.adagrad import groups_of_adagrad
from ds_trainer.engine.finite_step import complete_checks, factor_of, left_out, scales_loss
from ds_trainer.engine.first_step import no_step_before_the_first
from ds_trainer.engine.gradient_dtypes import (
    Float32Accumulation,
    accumulates_here,
    forget_autocast,
    keep_reduction_dtype,
    told_to_deepspeed,
)
from ds_trainer.engine.loading.creation_memory import bounded_creation, check_creation
from ds_trainer.engine.loading.library_state import ShardsModels
from ds_trainer.engine.loading.placement import weights_in_place
from ds_trainer.engine.parallelism import check_beliefs, forget_layout, take_over, tell_deepspeed
from ds_trainer.engine.process_group import limit_collectives
from ds_trainer.engine.reduction_order import reduce_in_fixed_order
from ds_trainer.engine.tensor.agreement import GradientAgreement
from ds_trainer.engine.tensor.cut import completed_cut
from ds_trainer.engine.tensor.repairs import keep_empty_slices
from ds_trainer.engine.tensor.slices import gradient_norm
from ds_trainer.engine.zero3.closing import forget_engine
from ds_trainer.engine.zero3.leaf_modules import make_leaves, reduce_leaves_in_time
from ds_trainer.engine.zero3.module_guard import guard_modules
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.secrets import keep_secrets_of, without_secrets

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What the weights are in a precision of 16 bits."""


def precision_of(config: CompiledConfig) -> str:
    """Type of the model's weights: bf16, fp16 or fp32."""
    return next((name for name in ("bf16", "fp16") if config.get(f"{name}.enabled")), "fp32")


class TrainingEngine:
    """A DeepSpeed engine that sums gradients over the global batch.

    Args:
        model: the module to train, on any device, or on meta with a weight source
            (:mod:`ds_trainer.engine.loading.weight_source`), or made under ``deepspeed.zero.Init``. ZeRO-3 shards it in
            place, one parameter at a time.
        optimizer: the optimizer over ``model``'s parameters, or parameter groups over which DeepSpeed builds the one
            that ``config`` names.
        config: the compiled configuration.
        layout: where every rank stands.
        compile_options: keywords of DeepSpeed's ``engine.compile`` (``backend``, ``compile_kwargs``); None leaves the
            model as it is, unless ``config`` asks for DeepSpeed's own compiler.
        whole_logits: somebody besides the model's own loss reads the logits of a training step; under tensor
            parallelism they are gathered then (:mod:`ds_trainer.engine.tensor.head`).

    Attributes:
        before_step: called once before the next :meth:`step`: who copies masters and optimizer states has it wait.
        module_guard: ends all ranks where they would run different modules under ZeRO-3; None at other stages.
        guarded: gradients that are not finite are kept from the weights (:mod:`ds_trainer.engine.finite_step`).

    Needs a process group (:func:`ds_trainer.engine.process_group.start_process_group`).

    Raises:
        ConfigError: the engine's picture of the ranks is not the layout's, nothing of the model could be sliced, or
            nothing says what a parameter on meta holds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[dict[str, Any]],
        config: CompiledConfig,
        layout: ParallelLayout,
        compile_options: dict[str, Any] | None = None,
        whole_logits: bool = False,
    ) -> None:
        import deepspeed

        keep_secrets_of(config.to_dict())
        self.layout = layout
        self.groups: ParallelGroups = parallel_groups(layout)
        mpu = tell_deepspeed(self.groups, config)
        self.stage: int = config.get("zero_optimization.stage")
        self.offloads_optimizer = config.get("zero_optimization.offload_optimizer.device", "none") != "none"
        self._clipping: float = config.get("gradient_clipping")
        self.deepspeed: DeepSpeedEngine
        given = "model_parameters" if isinstance(optimizer, list) else "optimizer"
        if self.stage == 3:
            make_leaves(model)
        forget_autocast(model)
        placed = weights_in_place(model, self.groups, mpu)
        cut = completed_cut(self.groups, whole_logits)
        with no_step_before_the_first(), cut, placed, bounded_creation() as spared, groups_of_adagrad():
            keywords = {given: optimizer, "config": told_to_deepspeed(config), "mpu": mpu}
            self.deepspeed, *_ = deepspeed.initialize(model=model, **keywords)
        check_creation(self.deepspeed.optimizer, spared)
        # DeepSpeed writes this into every checkpoint; what it uses itself it has read by now.
        self.deepspeed.config = without_secrets(self.deepspeed.config)
        self._library_state = ShardsModels(self.deepspeed.config) if self.stage == 3 else None
        take_over(self.deepspeed, mpu)
        keep_empty_slices(self.deepspeed)
        sizes = (config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps"))
        check_beliefs(self.deepspeed, self.groups, *sizes)
        limit_collectives()
        reduce_in_fixed_order(self.deepspeed)
        if self.stage == 3:
            reduce_leaves_in_time(model)
        self.module_guard = guard_modules(self.deepspeed)
        self.guarded = True
        complete_checks(self.deepspeed.optimizer)
        keep_reduction_dtype(self.deepspeed.optimizer, bool(config.get("torch_autocast.enabled")))
        self._accumulation = Float32Accumulation(model) if accumulates_here(config) else None
        self.scales_loss = scales_loss(self.deepspeed)
        by_deepspeed = config.get("compile.deepcompile") or config.get("compile.autoep_non_moe")
        self.before_step: Callable[[], None] | None = None
        self._compiled = bool(by_deepspeed) or compile_options is not None
        if self._compiled:
            self.deepspeed.compile(**(compile_options or {}))  # DeepSpeed's configuration alone compiles nothing
        self._agreement = GradientAgreement(model, self.groups) if layout.tp > 1 else None
        self.precision = precision_of(config)
        self._averaged_over = layout.gradient_ranks
        # DeepSpeed computes no gradient norm where it neither shards nor scales (float32 at stage 0): we do.
        self._own_norm = self.stage == 0 and self.precision == "fp32"
        self._grad_norm: Any = None
        if self._own_norm:
            self._parameters = [p for p in model.parameters() if p.requires_grad]
            self.deepspeed.clip_fp32_gradients = self._clip_and_keep_norm

    # -- one optimizer step: begin_micro_batch, forward, backward, ..., step ---------------------------------------

    def begin_micro_batch(self, last: bool) -> None:
        """Announce a micro-batch; with ``last`` its backward pass completes the reduction of gradients."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        if self.module_guard is not None:
            step = self.deepspeed.global_steps + 1
            self.module_guard.micro_batch = self.module_guard.micro_batch + 1 if step == self.module_guard.step else 1
            self.module_guard.step = step
        if last and self._accumulation is not None:
            self._accumulation.complete()

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate ``loss``, a scalar already divided by the item count of the global batch."""
        ranks = self._averaged_over
        self.deepspeed.backward(loss * (factor_of(loss, ranks) if self.guarded else ranks), scale_wrt_gas=False)

    def backward_mean(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Back-propagate ``loss``, a scalar whose gradient is to be averaged over the ranks.

        For steps that divide by the accumulation themselves, as those written for transformers do; ``retain_graph``
        keeps the graph for another pass.
        """
        # DeepSpeed 0.19.8 divides the gradient of the very tensor that its forward pass returned by the accumulation
        # steps, whatever scale_wrt_gas says; of anything computed from it, it does not.
        factor = factor_of(loss, 1) if self.guarded else 1.0
        self.deepspeed.backward(loss * factor, retain_graph=retain_graph, scale_wrt_gas=False)

    def step(self, leave_out: bool = False) -> bool:
        """Update the weights and clear the gradients; alike on all ranks.

        Args:
            leave_out: clear the gradients only.

        Returns:
            False where nothing was updated: ``leave_out``, or the gradient was not finite (in fp16 it may have
            overflowed; the loss scale is smaller then).

        Raises:
            ConfigError: in the first step, where tensor-parallel ranks disagree about what they all hold.
        """
        if self.before_step is not None:
            self.before_step()
            self.before_step = None
        if self._agreement is not None and self._agreement.check(self.deepspeed.device):
            self._agreement = None
        if self._own_norm:
            self._grad_norm = gradient_norm(self._parameters, self.groups)
            leave_out = leave_out or (self.guarded and not bool(self._grad_norm.isfinite()))
        with left_out(self.deepspeed.optimizer) if leave_out else nullcontext():
            self.deepspeed.step()
        return self.deepspeed.was_step_applied()

    def _clip_and_keep_norm(self) -> None:
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clipping, self._grad_norm)

    def grad_norm(self) -> float:
        """2-norm of the gradient of the last step, before clipping, over all ranks. May wait for the device."""
        norm = self._grad_norm if self._own_norm else self.deepspeed.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed wraps; a schedule over its ``param_groups`` is followed."""
        return self.deepspeed.basic_optimizer

    @property
    def own_schedule(self) -> Any:
        """The schedule that DeepSpeed built from ``config`` and advances in :meth:`step`; None without one."""
        return self.deepspeed.lr_scheduler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer as DeepSpeed wraps it; its ``param_groups`` are those of the one handed in."""
        return self.deepspeed.optimizer

    def save_state(self, directory: Path, tag: str) -> None:
        """Write the model and optimizer shards of all ranks to ``directory/tag``. Collective."""
        self.deepspeed.save_checkpoint(str(directory), tag=tag, save_latest=False)

    def load_state(self, directory: Path, tag: str) -> None:
        """Read what :meth:`save_state` wrote with the same layout and ZeRO stage. Collective.

        Raises:
            ConfigError: DeepSpeed found nothing to load.
        """
        path, _ = self.deepspeed.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise ConfigError(f"{directory / tag} holds no state that DeepSpeed can load for this layout.")

    def close(self) -> None:
        """Give back memory and hooks. The module stays usable where it is not sharded."""
        module = self.deepspeed.module
        if self.module_guard is not None:
            self.module_guard.close()
        if self._accumulation is not None:
            self._accumulation.close()
        if self._library_state is not None:
            self._library_state.close()
        self.deepspeed.destroy()
        forget_engine(module)
        forget_layout()
        if self._compiled:
            module._compiled_call_impl = None  # torch compiles in place: the next engine starts from the plain model

"""``EvaluationEngine``: an engine without an optimizer, for a model that is evaluated before training or never trained.

With ZeRO-3 the weights are sharded over all ranks and gathered layer by layer in the forward pass, which DeepSpeed
calls ZeRO-Inference; with tensor parallelism every rank holds its slices. Both can evaluate a model that is larger than
one device. A training engine can be built from the same model afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.host_time import spare_host_time
from ds_trainer.engine.loading.placement import loading_weights
from ds_trainer.engine.loading.transformers_zero3 import Zero3Registration
from ds_trainer.engine.modes import follow_modes
from ds_trainer.engine.tensor_parallel.partitioning import complete_partitioning
from ds_trainer.engine.tensor_parallel.repairs import allow_empty_slices, skip_input_check
from ds_trainer.engine.topology import install_mpu, reset_deepspeed_groups, set_deepspeed_groups
from ds_trainer.engine.training_engine import HALF_TYPES
from ds_trainer.engine.zero3.closing import release_engine
from ds_trainer.engine.zero3.coalesced_collectives import vectorize_collectives
from ds_trainer.engine.zero3.leaf_modules import mark_leaf_modules
from ds_trainer.engine.zero3.lean_hooks import lean_hooks
from ds_trainer.engine.zero3.module_guard import guard_modules
from ds_trainer.engine.zero3.registered_hooks import restore_hooks_when_registered
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.secrets import without_secrets

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Sections for training only; with them DeepSpeed would expect an optimizer.
_TRAINING_SECTIONS = ("optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps")
_TRAINING_ZERO_SECTIONS = ("offload_optimizer", "zenflow")


class EvaluationEngine:
    """A DeepSpeed engine that runs forward passes over sharded (ZeRO-3) or sliced (tensor parallelism) weights.

    Below ZeRO-3 the weights keep their dtype.

    Args:
        model: the module, as for the training engine; it is sharded in place.
        config: the compiled configuration.
        layout: the parallel layout.
        half: ``"bf16"`` or ``"fp16"`` to run ZeRO-3 in that precision; None for the configuration's.
        gather_logits: as for the training engine, which finds the model partitioned already.

    Needs a process group.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CompiledConfig,
        layout: ParallelLayout,
        half: str | None = None,
        gather_logits: bool = False,
    ) -> None:
        import deepspeed

        self.groups = parallel_groups(layout)
        mpu = set_deepspeed_groups(self.groups, config)
        settings = config.to_dict()
        for name in _TRAINING_SECTIONS:
            settings.pop(name, None)
        for name in _TRAINING_ZERO_SECTIONS:
            settings["zero_optimization"].pop(name, None)
        self.precision = half or config.precision.dtype
        if config.zero_stage < 3:
            # Lower stages shard optimizer states only, and half precision would round the weights permanently.
            settings["zero_optimization"] = {"stage": 0}
            settings = {key: value for key, value in settings.items() if key not in HALF_TYPES}
            self.precision = "fp32"
        elif half is not None:
            settings = {key: value for key, value in settings.items() if key not in (*HALF_TYPES, "torch_autocast")}
            settings[half] = {"enabled": True}
        self.deepspeed: DeepSpeedEngine
        sharded = config.zero_stage == 3
        spare_host_time()
        if sharded:
            mark_leaf_modules(model)
        with complete_partitioning(self.groups, gather_logits), loading_weights(model, self.groups, mpu):
            self.deepspeed, *_ = deepspeed.initialize(model=model, config=settings, mpu=mpu)
        follow_modes(self.deepspeed)
        self._library_state = Zero3Registration(without_secrets(settings)) if sharded else None
        install_mpu(self.deepspeed, mpu)
        allow_empty_slices(self.deepspeed)
        skip_input_check(self.deepspeed)
        self._module_guard = guard_modules(self.deepspeed)
        self._collectives = self._hooks = None
        if sharded:
            restore_hooks_when_registered(self.deepspeed)
            self._collectives = vectorize_collectives(self.deepspeed)
            self._hooks = lean_hooks(self.deepspeed, compiled=False)

    def close(self) -> None:
        """Frees memory and removes hooks; the weights stay sharded, as the next engine expects them."""
        if self._module_guard is not None:
            self._module_guard.close()
        if self._library_state is not None:
            self._library_state.close()
        for shortened in (self._collectives, self._hooks):
            if shortened is not None:
                shortened.close()
        self.deepspeed.destroy()
        release_engine(self.deepspeed.module)
        reset_deepspeed_groups()

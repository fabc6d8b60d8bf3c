"""``EvaluationEngine``: the layout without an optimizer, for a model that is evaluated before it is trained, or never.

With ZeRO-3 the weights are spread over all ranks and gathered layer by layer in the forward pass, which DeepSpeed calls
ZeRO-Inference; with tensor parallelism every rank holds its slices. Either way a model that is larger than one device
can be evaluated. The training engine that is built next takes the model as it is then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.loading.library_state import ShardsModels
from ds_trainer.engine.loading.placement import weights_in_place
from ds_trainer.engine.parallelism import forget_layout, take_over, tell_deepspeed
from ds_trainer.engine.process_group import limit_collectives
from ds_trainer.engine.tensor.cut import completed_cut
from ds_trainer.engine.tensor.repairs import keep_empty_slices
from ds_trainer.engine.training_engine import HALF_TYPES, precision_of
from ds_trainer.engine.zero3.closing import forget_engine
from ds_trainer.engine.zero3.leaf_modules import make_leaves
from ds_trainer.engine.zero3.module_guard import guard_modules
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.secrets import without_secrets

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Blocks about training; DeepSpeed would look for an optimizer.
_OF_TRAINING = ("optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps")
_ZERO_OF_TRAINING = ("offload_optimizer", "zenflow")


class EvaluationEngine:
    """A DeepSpeed engine that runs forward passes over sharded (ZeRO-3) or sliced (tensor parallelism) weights.

    Below ZeRO-3 the weights keep their own number format.

    Args:
        model: the module, as of the engine that trains; it is sharded in place.
        config: the compiled configuration.
        layout: where every rank stands.
        half: ``"bf16"`` or ``"fp16"`` to run in that precision with ZeRO-3; None for the configuration's.
        whole_logits: as of the engine that trains: the model stays cut for it.

    Needs a process group.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CompiledConfig,
        layout: ParallelLayout,
        half: str | None = None,
        whole_logits: bool = False,
    ) -> None:
        import deepspeed

        self.groups = parallel_groups(layout)
        mpu = tell_deepspeed(self.groups, config)
        settings = config.to_dict()
        for name in _OF_TRAINING:
            settings.pop(name, None)
        for name in _ZERO_OF_TRAINING:
            settings["zero_optimization"].pop(name, None)
        self.precision = half or precision_of(config)
        if config.get("zero_optimization.stage") < 3:
            # Lower stages shard what belongs to an optimizer, and half precision would round the weights for good.
            settings["zero_optimization"] = {"stage": 0}
            settings = {key: value for key, value in settings.items() if key not in HALF_TYPES}
            self.precision = "fp32"
        elif half is not None:
            settings = {key: value for key, value in settings.items() if key not in (*HALF_TYPES, "torch_autocast")}
            settings[half] = {"enabled": True}
        self.deepspeed: DeepSpeedEngine
        sharded = config.get("zero_optimization.stage") == 3
        if sharded:
            make_leaves(model)
        with completed_cut(self.groups, whole_logits), weights_in_place(model, self.groups, mpu):
            self.deepspeed, *_ = deepspeed.initialize(model=model, config=settings, mpu=mpu)
        self._library_state = ShardsModels(without_secrets(settings)) if sharded else None
        take_over(self.deepspeed, mpu)
        keep_empty_slices(self.deepspeed)
        limit_collectives()
        self._module_guard = guard_modules(self.deepspeed)

    def close(self) -> None:
        """Give back memory and hooks; the weights stay sharded, as an engine that is built next expects them."""
        if self._module_guard is not None:
            self._module_guard.close()
        if self._library_state is not None:
            self._library_state.close()
        self.deepspeed.destroy()
        forget_engine(self.deepspeed.module)
        forget_layout()

"""``EvaluationEngine``: ZeRO-3 without an optimizer, for a model that is evaluated before it is trained, or never.

The weights are spread over all ranks and gathered layer by layer in the forward pass, so that a model larger than one
device can be evaluated. DeepSpeed calls this ZeRO-Inference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.parallelism import take_over, tell_deepspeed
from ds_trainer.engine.tensor_cut import completed_cut
from ds_trainer.engine.tensor_repairs import keep_empty_slices
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Blocks about training; DeepSpeed would look for an optimizer.
_OF_TRAINING = ("optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps")
_ZERO_OF_TRAINING = ("offload_optimizer", "zenflow")
_HALVES = ("bf16", "fp16")


class EvaluationEngine:
    """A DeepSpeed engine that runs forward passes over weights sharded by ZeRO-3.

    Args:
        model: the module, on any device; it is sharded in place.
        config: the compiled configuration, of ZeRO stage 3.
        layout: where every rank stands.
        half: ``"bf16"`` or ``"fp16"`` to run in that precision; None for the configuration's.
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
        mpu = tell_deepspeed(self.groups)
        settings = config.to_dict()
        for name in _OF_TRAINING:
            settings.pop(name, None)
        for name in _ZERO_OF_TRAINING:
            settings["zero_optimization"].pop(name, None)
        if half is not None:
            settings = {key: value for key, value in settings.items() if key not in (*_HALVES, "torch_autocast")}
            settings[half] = {"enabled": True}
        self.precision = half or next((name for name in _HALVES if config.get(f"{name}.enabled")), "fp32")
        self.deepspeed: DeepSpeedEngine
        with completed_cut(self.groups, whole_logits):
            self.deepspeed, *_ = deepspeed.initialize(model=model, config=settings, mpu=mpu)
        take_over(self.deepspeed, mpu)
        keep_empty_slices(self.deepspeed)

    def close(self) -> None:
        """Give back memory and hooks; the weights stay sharded, as an engine that is built next expects them."""
        self.deepspeed.destroy()

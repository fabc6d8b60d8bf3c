"""``EvaluationEngine``: an engine without an optimizer, for a model that is evaluated before training or never trained.

With ZeRO-3 the weights are sharded over all ranks and gathered layer by layer in the forward pass, which DeepSpeed
calls ZeRO-Inference; with tensor parallelism every rank holds its slices. Both can evaluate a model that is larger than
one device. A training engine can be built from the same model afterwards.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.host_time import spare_host_time
from ds_trainer.engine.loading.placement import loading_weights
from ds_trainer.engine.loading.transformers_zero3 import end_registrations
from ds_trainer.engine.tensor_parallel.repairs import skip_input_check
from ds_trainer.engine.topology import install_mpu, reset_deepspeed_groups, set_deepspeed_groups
from ds_trainer.engine.weights import HALF_TYPES
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

        from ds_trainer.engine.tensor_parallel.partitioning import complete_partitioning

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
        spare_host_time()
        self._zero3: Zero3Parts | None = None
        if config.zero_stage == 3:
            from ds_trainer.engine.zero3.parts import Zero3Parts

            self._zero3 = Zero3Parts(model)
        else:
            end_registrations()
        with complete_partitioning(self.groups, gather_logits), loading_weights(model, self.groups, mpu):
            self.deepspeed, *_ = deepspeed.initialize(model=model, config=settings, mpu=mpu)
        follow_modes(self.deepspeed)
        install_mpu(self.deepspeed, mpu)
        skip_input_check(self.deepspeed)
        if self._zero3 is not None:
            self._zero3.created(self.deepspeed, without_secrets(settings))
            self._zero3.complete(self.deepspeed, compiled=False)

    def close(self) -> None:
        """Frees memory and removes hooks; the weights stay sharded, as the next engine expects them."""
        if self._zero3 is not None:
            self._zero3.close()
        self.deepspeed.destroy()
        if self._zero3 is not None:
            self._zero3.release(self.deepspeed.module)
        reset_deepspeed_groups()


# The mode of an engine is that of its module: scripts ask ``model.training`` of the engine that they get.


def follow_modes(engine: DeepSpeedEngine) -> None:
    """``engine.train()`` and ``eval()`` set ``engine.training`` and return the engine, as those of any module.

    DeepSpeed's only pass the mode on to the module: ``model.training`` stays True in evaluations, and
    ``model = model.eval()`` gives None. Metrics that a ``compute_loss`` keeps by mode would be mixed.
    """
    engine.__class__ = _with_modes(cast(Any, type(engine)))


@cache
def _with_modes(kind: Any) -> Any:
    def train(self: Any, mode: bool = True) -> Any:
        kind.train(self, mode)
        self.training = mode
        return self

    members = {"train": train, "eval": lambda self: self.train(False), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)

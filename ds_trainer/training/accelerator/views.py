"""What hangs below the accelerator in accelerate's own class: state, DeepSpeed plugin, gradient state. Read-only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.config.compiled import CompiledConfig

if TYPE_CHECKING:
    from ds_trainer.training.accelerator.trainer_accelerator import TrainerAccelerator


class DeepSpeedPluginView:
    """What scripts read of accelerate's ``DeepSpeedPlugin``, from the compiled configuration."""

    def __init__(self, compiled: CompiledConfig) -> None:
        self._compiled = compiled

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """A copy of the compiled configuration, complete: ``deepspeed.initialize`` takes it for another engine."""
        return self._compiled.to_dict()

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self._compiled.get("zero_optimization.stage"))

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return int(self._compiled.get("gradient_accumulation_steps"))

    @property
    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 for none."""
        return float(self._compiled.get("gradient_clipping"))

    @property
    def hf_ds_config(self) -> Any:
        """The configuration as accelerate's ``HfDeepSpeedConfig``: ``is_zero3()``, ``is_offload()``, ``get_value``."""
        from accelerate.utils.deepspeed import HfDeepSpeedConfig

        return HfDeepSpeedConfig(self._compiled.to_dict())

    def is_zero3_init_enabled(self) -> bool:
        """False: no model is built sharded behind a script's back."""
        return False


@dataclass(frozen=True)
class EngineView:
    """What scripts read of accelerate's ``DeepSpeedEngineWrapper``.

    Attributes:
        engine: the DeepSpeed engine.
        backward: :meth:`TrainerAccelerator.backward`.
    """

    engine: Any
    backward: Callable[..., None]


class GradientStateView:
    """What scripts read of accelerate's ``GradientState``: accumulation from our engine, loaders from accelerate."""

    def __init__(self, accelerator: TrainerAccelerator) -> None:
        self._accelerator = accelerator

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its optimizer step."""
        return self._accelerator.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._accelerator.gradient_accumulation_steps

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Fields of accelerate's ``GradientAccumulationPlugin``."""
        return {"num_steps": self.num_steps, "sync_each_batch": False}

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader that accelerate made is being read."""
        return bool(_loaders().in_dataloader)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader gave its last batch."""
        return bool(_loaders().end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples in the last global batch of that loader; 0 for a full one, -1 where nothing is known."""
        return int(_loaders().remainder)


def _loaders() -> Any:
    from accelerate.state import GradientState

    return GradientState()


class StateView:
    """What scripts read of accelerate's ``AcceleratorState``; the rest is the accelerator's own."""

    fsdp_plugin = None
    megatron_lm_plugin = None
    device_mesh = None

    def __init__(self, accelerator: TrainerAccelerator) -> None:
        self._accelerator = accelerator

    @property
    def deepspeed_plugin(self) -> DeepSpeedPluginView:
        """The DeepSpeed configuration."""
        return self._accelerator.deepspeed_plugin

    @property
    def device(self) -> Any:
        """This rank's device."""
        return self._accelerator.device

    @property
    def num_processes(self) -> int:
        """Ranks of the job."""
        return self._accelerator.num_processes

    @property
    def process_index(self) -> int:
        """Global rank."""
        return self._accelerator.process_index

    @property
    def local_process_index(self) -> int:
        """Rank on this machine."""
        return self._accelerator.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._accelerator.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._accelerator.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._accelerator.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._accelerator.use_distributed

    @property
    def distributed_type(self) -> Any:
        """accelerate's ``DistributedType.DEEPSPEED``."""
        return self._accelerator.distributed_type

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._accelerator.mixed_precision

    @property
    def parallelism_config(self) -> Any:
        """Sizes of the parallel axes."""
        return self._accelerator.parallelism_config


def mixed_precision(compiled: CompiledConfig) -> str:
    """accelerate's word for the number format of forward passes: ``"no"``, ``"bf16"`` or ``"fp16"``."""
    for name in ("bf16", "fp16"):
        if compiled.get(f"{name}.enabled"):
            return name
    return "bf16" if compiled.get("torch_autocast.enabled") else "no"

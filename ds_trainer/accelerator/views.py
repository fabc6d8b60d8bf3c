"""Read-only counterparts of the objects that accelerate's class holds: state, DeepSpeed plugin, gradient state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator


class DeepSpeedPluginView:
    """Counterpart of accelerate's ``DeepSpeedPlugin``, from the compiled configuration."""

    def __init__(self, compiled: CompiledConfig) -> None:
        self._compiled = compiled

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """A copy of the compiled configuration, complete: ``deepspeed.initialize`` takes it for another engine.

        Without tensor parallelism: DeepSpeed would partition the other model (a reference model, a reward model)
        without the corrections of this package, and its outputs would differ between the ranks of a replica.
        """
        compiled = self._compiled
        settings = compiled.to_dict()
        settings.pop("tensor_parallel", None)
        step_samples = compiled.micro_batch_size * compiled.gradient_accumulation_steps
        if settings.get("train_batch_size") != step_samples * distributed.world_size():
            settings.pop("train_batch_size", None)  # counts replicas, and every rank is one for the other engine
        return settings

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self._compiled.zero_stage

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._compiled.gradient_accumulation_steps

    @property
    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 for none."""
        return self._compiled.gradient_clipping

    @property
    def hf_ds_config(self) -> Any:
        """The configuration as accelerate's ``HfDeepSpeedConfig``: ``is_zero3()``, ``is_offload()``, ``get_value``."""
        from accelerate.utils.deepspeed import HfDeepSpeedConfig

        return HfDeepSpeedConfig(self._compiled.to_dict())

    def is_zero3_init_enabled(self) -> bool:
        """False: models that a script builds are never sharded implicitly."""
        return False


@dataclass(frozen=True)
class EngineView:
    """Counterpart of accelerate's ``DeepSpeedEngineWrapper``.

    Attributes:
        engine: the DeepSpeed engine.
        backward: :meth:`TrainerAccelerator.backward`.
    """

    engine: Any
    backward: Callable[..., None]


class GradientStateView:
    """Counterpart of accelerate's ``GradientState``: accumulation from the engine, loaders from accelerate."""

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
        """Whether a loader prepared by accelerate is being read."""
        return bool(_loaders().in_dataloader)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader has returned its last batch."""
        return bool(_loaders().end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples in the last global batch of that loader; 0 if it is full, -1 if unknown."""
        return int(_loaders().remainder)


def _loaders() -> Any:
    from accelerate.state import GradientState

    return GradientState()


_STATE = frozenset(
    {
        *("deepspeed_plugin", "device", "distributed_type", "mixed_precision", "parallelism_config", "use_distributed"),
        *("num_processes", "process_index", "local_process_index"),
        *("is_main_process", "is_local_main_process", "is_last_process"),
    }
)


class StateView:
    """Counterpart of accelerate's ``AcceleratorState``: the members of the accelerator named in ``_STATE``."""

    fsdp_plugin = None
    megatron_lm_plugin = None
    device_mesh = None

    def __init__(self, accelerator: TrainerAccelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name not in _STATE:
            raise AttributeError(f"trainer.accelerator.state has no {name!r}")
        return getattr(self._accelerator, name)


def mixed_precision(compiled: CompiledConfig) -> str:
    """accelerate's word for the number format of forward passes: ``"no"``, ``"bf16"`` or ``"fp16"``."""
    dtype = compiled.precision.compute
    return "no" if dtype == "fp32" else dtype

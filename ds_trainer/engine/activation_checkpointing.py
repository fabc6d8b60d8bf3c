"""Recomputation in DeepSpeed's way: kept activations on the host, or cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.utils.errors import ConfigError

SECTION = "activation_checkpointing"
# Where transformers' layers keep the function that runs them and recomputes them later.
_FUNCTION = "_gradient_checkpointing_func"


def checkpoint_with_deepspeed(model: nn.Module, config: CompiledConfig) -> None:
    """Let the layers of ``model`` that recompute do it through DeepSpeed, as ``activation_checkpointing`` says.

    Needs a process group. DeepSpeed's version is re-entrant: something that goes into a layer must need a gradient.

    Raises:
        ConfigError: no layer of the model recomputes in a way that can be replaced.
    """
    from deepspeed import checkpointing

    layers: list[Any] = [module for module in model.modules() if callable(getattr(module, _FUNCTION, None))]
    if not layers:
        raise ConfigError(
            f"{config.origin(next(p for p in config.paths() if p.startswith(SECTION))).place}: {type(model).__name__} "
            f"has no layers that recompute through DeepSpeed. Remove {SECTION}, and let the model call "
            "deepspeed.checkpointing.checkpoint itself."
        )
    checkpointing.configure(
        None,
        partition_activations=config.get(f"{SECTION}.partition_activations", False),
        contiguous_checkpointing=config.get(f"{SECTION}.contiguous_memory_optimization", False),
        num_checkpoints=config.get(f"{SECTION}.number_checkpoints"),
        checkpoint_in_cpu=config.get(f"{SECTION}.cpu_checkpointing", False),
        synchronize=config.get(f"{SECTION}.synchronize_checkpoint_boundary", False),
        profile=config.get(f"{SECTION}.profile", False),
    )
    for layer in layers:
        setattr(layer, _FUNCTION, checkpointing.checkpoint)

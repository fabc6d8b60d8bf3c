"""DeepSpeed's activation checkpointing: checkpoints on the host, or partitioned over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.utils.errors import ConfigError

SECTION = "activation_checkpointing"
# The attribute of transformers' layers that holds their checkpointing function.
_FUNCTION = "_gradient_checkpointing_func"


def checkpoint_with_deepspeed(model: nn.Module, config: CompiledConfig) -> None:
    """Makes the checkpointed layers of ``model`` use DeepSpeed, as configured in ``activation_checkpointing``.

    Needs a process group. DeepSpeed's version is re-entrant: an input of each layer must require a gradient.

    Raises:
        ConfigError: the model has no layer whose checkpointing function can be replaced.
    """
    from deepspeed import checkpointing

    options = config.activation_checkpointing
    assert options is not None  # the caller has looked
    layers: list[Any] = [module for module in model.modules() if callable(getattr(module, _FUNCTION, None))]
    if not layers:
        raise ConfigError(
            f"{options.source}: {type(model).__name__} "
            f"has no layers that can use DeepSpeed's activation checkpointing. Remove {SECTION}, and call "
            "deepspeed.checkpointing.checkpoint in the model."
        )
    checkpointing.configure(
        None,
        partition_activations=options.partition_activations,
        contiguous_checkpointing=options.contiguous_memory_optimization,
        num_checkpoints=options.number_checkpoints,
        checkpoint_in_cpu=options.cpu_checkpointing,
        synchronize=options.synchronize_checkpoint_boundary,
        profile=options.profile,
    )
    for layer in layers:
        setattr(layer, _FUNCTION, checkpointing.checkpoint)

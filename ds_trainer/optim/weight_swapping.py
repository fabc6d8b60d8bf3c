"""Optimizers that use different weights in training and evaluation, switched with ``train()`` and ``eval()``."""

from __future__ import annotations

from typing import Any

from ds_trainer.utils.errors import ConfigError


def swaps_weights(optimizer: Any) -> bool:
    """Whether ``optimizer`` has ``train()`` and ``eval()``, like the schedule-free optimizers."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def use_training_weights(optimizer: Any) -> None:
    """Switches to the training weights; does nothing if they are in use, or for other optimizers."""
    if swaps_weights(optimizer):
        optimizer.train()


def use_evaluation_weights(optimizer: Any) -> None:
    """Switches to the evaluation weights, like :func:`use_training_weights`."""
    if swaps_weights(optimizer):
        optimizer.eval()


def check_weight_swapping(optimizer: Any, stage: int, precision: str) -> None:
    """Checks a user's optimizer: weights that it swaps in DeepSpeed's copies would never reach the model.

    Raises:
        ConfigError: at ZeRO stages above 0 and in 16-bit precision.
    """
    if swaps_weights(optimizer) and (stage > 0 or precision != "fp32"):
        raise ConfigError(
            f"{type(optimizer).__name__} uses different weights for evaluation (train() and eval()), but with "
            f"zero_stage={stage} and precision {precision} DeepSpeed gives it copies of the weights. Set zero_stage=0 "
            "and leave bf16 and fp16 off (torch_autocast=bf16 works)."
        )

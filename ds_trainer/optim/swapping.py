"""Optimizers that train one set of weights and evaluate another, with ``train()`` and ``eval()`` to change over."""

from __future__ import annotations

from typing import Any

from ds_trainer.utils.errors import ConfigError


def swaps_weights(optimizer: Any) -> bool:
    """Whether ``optimizer`` has ``train()`` and ``eval()``, as the schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def weights_of_training(optimizer: Any) -> None:
    """Put the weights of training in place; nothing where they are, or for any other optimizer."""
    if swaps_weights(optimizer):
        optimizer.train()


def weights_of_evaluation(optimizer: Any) -> None:
    """Put the weights of evaluation in place, as :func:`weights_of_training`."""
    if swaps_weights(optimizer):
        optimizer.eval()


def check_swapping(optimizer: Any, stage: int, precision: str) -> None:
    """Refuse a handed-in optimizer that would write other weights into copies, which the model never sees.

    Raises:
        ConfigError: at ZeRO stages above 0 and in 16-bit precision.
    """
    if swaps_weights(optimizer) and (stage > 0 or precision != "fp32"):
        raise ConfigError(
            f"{type(optimizer).__name__} puts other weights in place for evaluation (train() and eval()), but with "
            f"zero_stage={stage} and precision {precision} DeepSpeed gives it copies of the weights. Set zero_stage=0 "
            "and leave bf16 and fp16 off (torch_autocast=bf16 works)."
        )

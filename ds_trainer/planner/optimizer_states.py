"""Bytes of optimizer states, by the name of the optimizer."""

from __future__ import annotations

ADAM = 8.0
"""Bytes of an element for Adam: two numbers in float32."""

_STATE_BYTES = (("8bit", 2.0), ("adafactor", 0.0), ("lion", 4.0), ("adagrad", 4.0), ("rmsprop", 4.0), ("sgd", 0.0))


def state_bytes(optimizer: str) -> float:
    """Bytes of optimizer states of an element, by the name of the optimizer: Adam's for one that is not known."""
    name = optimizer.lower().replace("_", "")
    return next((size for part, size in _STATE_BYTES if part in name), ADAM)

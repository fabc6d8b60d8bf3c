"""Orders written out, for short ones."""

from __future__ import annotations

import numpy as np

from ds_trainer.data.order import Order


def in_full(order: Order) -> list[int]:
    """All positions."""
    return order.at(np.arange(len(order))).tolist()


def chunks(order: Order, size: int) -> list[list[int]]:
    """All positions, in lists of ``size``."""
    positions = in_full(order)
    return [positions[start : start + size] for start in range(0, len(positions), size)]

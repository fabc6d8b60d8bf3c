"""Whether classes of this package stand in place of those of transformers in this process.

Code written for transformers' Trainer then finds what the constructor of that Trainer sets up: the process group and
accelerate's state.
"""

from __future__ import annotations

_replaced = False


def set_replaced() -> None:
    """Note that they do; :mod:`ds_trainer.compatibility.replacement` calls it."""
    global _replaced
    _replaced = True


def is_replaced() -> bool:
    """Whether they do."""
    return _replaced

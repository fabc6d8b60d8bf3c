"""Fields that a subclass of another package defines again: they are that package's, and this one ignores them.

TRL's ``SFTConfig``, for example, has a ``packing`` of its own, which its trainer carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

# Arguments of this package under names that other packages use too.
SHARED_NAMES = ("packing", "packing_strategy", "eval_packing", "max_length")


def is_redefined(args: Any, name: str) -> bool:
    """Whether the field ``name`` of ``args`` is one of :data:`SHARED_NAMES` that belongs to another package."""
    if name not in SHARED_NAMES:
        return False
    if name in getattr(args, "fields_of_subclass", ()):  # arguments that were made from those of transformers
        return True
    owner = next((cls for cls in type(args).__mro__ if name in vars(cls).get("__annotations__", ())), None)
    return owner is None or not owner.__module__.startswith("ds_trainer.")


def packs(args: Any) -> bool:
    """Whether the Trainer packs the samples of training."""
    return bool(getattr(args, "packing", False)) and not is_redefined(args, "packing")


def left_to_others(classes: Sequence[Any]) -> set[tuple[Any, str]]:
    """Class and name of the fields that a parser of ``classes`` leaves to another one of them.

    A script may have a ``max_length`` of its own beside the arguments: the flag is then that of the script.
    """
    others = {field.name for cls in classes if not hasattr(cls, "topics") for field in fields(cls)}
    ours = [(cls, field) for cls in classes if hasattr(cls, "topics") for field in fields(cls)]
    is_own = [(cls, field.name) for cls, field in ours if field.metadata.get("help", "").startswith("(own)")]
    return {(cls, name) for cls, name in is_own if name in others}

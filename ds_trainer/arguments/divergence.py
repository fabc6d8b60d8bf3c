"""What is wrong with arguments about steps that diverge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments


def divergence_problems(args: TrainingArguments) -> list[str]:
    """One sentence for each value that cannot work."""
    problems = []
    factor = args.loss_spike_factor
    if factor is not None and not (math.isfinite(factor) and factor > 1):
        problems.append(f"loss_spike_factor={factor!r} must be a finite number above 1, or None (nobody looks).")
    for name, asked in (("nonfinite_policy", True), ("loss_spike_policy", factor is not None)):
        if not asked or str(getattr(args, name)) != "rollback":
            continue
        for other, value in (("save_strategy", "no"), ("save_only_model", "True")):
            if str(getattr(args, other)) == value:
                problems.append(
                    f"{name}=rollback goes back to a checkpoint, but {other}={value} writes none that a run can go on "
                    f"from. Choose another {other}, or {name}=skip."
                )
    return problems

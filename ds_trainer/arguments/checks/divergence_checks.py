"""Checks of the arguments that handle diverging steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments


def divergence_problems(args: TrainingArguments) -> list[str]:
    """One sentence for each policy that other arguments rule out."""
    problems = []
    for name, active in (("nonfinite_policy", True), ("loss_spike_policy", args.loss_spike_factor is not None)):
        if not active or str(getattr(args, name)) != "rollback":
            continue
        for other, value in (("save_strategy", "no"), ("save_only_model", "True")):
            if str(getattr(args, other)) == value:
                problems.append(
                    f"{name}=rollback returns to a checkpoint, but {other}={value} writes none that a run can resume "
                    f"from. Choose another {other}, or {name}=skip."
                )
    return problems

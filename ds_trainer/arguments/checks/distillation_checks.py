"""Checks of the settings of distillation, for recipes and for the Trainer."""

from __future__ import annotations

DIVERGENCES = ("forward_kl", "reverse_kl")


def distillation_problems(temperature: float, hard_loss_weight: float, divergence: str) -> list[str]:
    """What cannot work, as one sentence per problem.

    Args:
        temperature: divides the logits of student and teacher.
        hard_loss_weight: weight of the cross-entropy with the labels.
        divergence: name of the divergence.
    """
    problems = []
    if not temperature > 0:
        problems.append(f"distillation.temperature={temperature} must be above 0.")
    if not 0 <= hard_loss_weight <= 1:
        problems.append(f"distillation.hard_loss_weight={hard_loss_weight} must be between 0 and 1.")
    if divergence not in DIVERGENCES:
        problems.append(f"distillation.divergence={divergence!r} is not one of {', '.join(DIVERGENCES)}.")
    return problems

"""``DistillationSpec``: the section ``distillation`` of a recipe: a teacher whose distribution the model learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_trainer.arguments.checks.value_checks import distillation_problems


@dataclass(frozen=True)
class DistillationSpec:
    """A teacher, whose distribution over the next token the model learns. ``distillation: PATH`` names the teacher.

    Attributes:
        teacher: directory or Hub name of a language model with the tokenizer of the model that is trained.
        temperature: divides the logits of both; above 1, unlikely tokens count more.
        hard_loss_weight: weight of the loss against the data, from 0 to 1; the rest is that of the divergence from the
            teacher.
        divergence: ``forward_kl``: the model covers all that the teacher may say. ``reverse_kl``: it says what the
            teacher finds likely.
        dtype: type of the teacher's weights; default: that of the run's precision (``bf16``), else float32.
    """

    teacher: str | None = None
    temperature: float = 1.0
    hard_loss_weight: float = 0.1
    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    dtype: str | None = None

    def problems(self, task: str) -> list[str]:
        """What cannot work, as one sentence per problem; ``task`` is that of the recipe."""
        problems = list(distillation_problems(self.temperature, self.hard_loss_weight, self.divergence))
        if self.teacher is None:
            problems.append("distillation.teacher is missing; give the directory or the Hub name of a language model.")
        if task != "sft":
            problems.append(f"distillation is for task sft, not {task}; remove one of them.")
        return problems

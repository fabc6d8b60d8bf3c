"""How long a run is: rounds, steps and epochs, as pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_trainer.arguments.training_arguments import TrainingArguments


@dataclass(frozen=True)
class RunPlan:
    """Length of a run.

    Attributes:
        rounds_per_epoch: micro-batches of each replica in one epoch.
        steps_per_epoch: optimizer steps in one epoch; the last may accumulate fewer micro-batches.
        accumulation: micro-batches of each replica in a full step.
        max_steps: optimizer steps of the whole run.
        epochs: epochs that are begun.
    """

    rounds_per_epoch: int
    steps_per_epoch: int
    accumulation: int
    max_steps: int
    epochs: int

    @classmethod
    def of(cls, args: TrainingArguments, rounds_per_epoch: int) -> RunPlan:
        """The plan for epochs of ``rounds_per_epoch``: ``max_steps`` if positive, else ``num_train_epochs``."""
        accumulation = args.gradient_accumulation_steps
        steps_per_epoch = max(1, math.ceil(rounds_per_epoch / accumulation))
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
        return cls(rounds_per_epoch, steps_per_epoch, accumulation, max_steps, math.ceil(max_steps / steps_per_epoch))

    @classmethod
    def of_values(cls, values: tuple[int, int, int, int, int, int, int], accumulation: int) -> RunPlan:
        """The plan that ``Trainer.set_initial_training_values`` describes."""
        epochs, steps_per_epoch, _, _, _, rounds_per_epoch, max_steps = values
        return cls(rounds_per_epoch, steps_per_epoch, accumulation, max_steps, epochs)

    def rounds_of_step(self, step: int) -> int:
        """Micro-batches of each replica in step ``step`` of an epoch, counted from 0."""
        return min(self.accumulation, self.rounds_per_epoch - step * self.accumulation)

    def epoch_after(self, epoch: int, step: int) -> float:
        """Epochs done when step ``step`` (from 0) of epoch ``epoch`` is finished."""
        return epoch + min(1.0, (step + 1) * self.accumulation / self.rounds_per_epoch)

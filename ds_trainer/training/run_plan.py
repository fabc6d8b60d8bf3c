"""How long a run is: rounds, steps and epochs, as pure arithmetic."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError


@dataclass(frozen=True)
class RunPlan:
    """Length of a run.

    Attributes:
        rounds_per_epoch: micro-batches of each replica in one epoch; None where only the end of the data will tell.
        steps_per_epoch: optimizer steps in one epoch; the last may accumulate fewer micro-batches. Where the length is
            not known: ``max_steps``, so that the fraction of an epoch is that of the run.
        accumulation: micro-batches of each replica in a full step.
        max_steps: optimizer steps of the whole run.
        epochs: epochs that are begun; where the length is not known: as many as it takes.
    """

    rounds_per_epoch: int | None
    steps_per_epoch: int
    accumulation: int
    max_steps: int
    epochs: int

    @classmethod
    def of(cls, args: TrainingArguments, rounds_per_epoch: int | None) -> RunPlan:
        """The plan for epochs of ``rounds_per_epoch``: ``max_steps`` if positive, else ``num_train_epochs``.

        Raises:
            ConfigError: neither the length of an epoch nor ``max_steps`` is known.
        """
        accumulation = args.gradient_accumulation_steps
        if rounds_per_epoch is None:
            if args.max_steps <= 0:
                raise ConfigError(
                    f"The training data has no length, and max_steps={args.max_steps}: set max_steps to the number of "
                    "optimizer steps."
                )
            return cls(None, args.max_steps, accumulation, args.max_steps, sys.maxsize)
        steps_per_epoch = max(1, math.ceil(rounds_per_epoch / accumulation))
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
        return cls(rounds_per_epoch, steps_per_epoch, accumulation, max_steps, math.ceil(max_steps / steps_per_epoch))

    @classmethod
    def of_values(cls, values: tuple[int, int, int, int, int, int | None, int], accumulation: int) -> RunPlan:
        """The plan that ``Trainer.set_initial_training_values`` describes."""
        epochs, steps_per_epoch, _, _, _, rounds_per_epoch, max_steps = values
        return cls(rounds_per_epoch, steps_per_epoch, accumulation, max_steps, epochs)

    def rounds_of_step(self, step: int) -> int:
        """Micro-batches of each replica in step ``step`` of an epoch, counted from 0."""
        if self.rounds_per_epoch is None:
            return self.accumulation
        return max(0, min(self.accumulation, self.rounds_per_epoch - step * self.accumulation))

    def epoch_after(self, epoch: int, step: int) -> float:
        """Epochs done when step ``step`` (from 0) of epoch ``epoch`` is finished."""
        if self.rounds_per_epoch is None:
            return epoch + (step + 1) / self.steps_per_epoch
        return epoch + min(1.0, (step + 1) * self.accumulation / self.rounds_per_epoch)

    def position(self, global_step: int, epoch: float) -> tuple[int, int]:
        """Epoch and step in it (from 0) where a run goes on after ``global_step`` steps, at ``epoch``."""
        if self.rounds_per_epoch is not None:
            return divmod(global_step, self.steps_per_epoch)
        begun = max(0, math.ceil(epoch) - 1)
        return begun, round((epoch - begun) * self.steps_per_epoch)

    def same_position(self, epoch: float, max_steps: int) -> float:
        """``epoch`` of a run of ``max_steps`` as this plan writes the same place in the data."""
        if self.rounds_per_epoch is not None:
            return epoch
        begun = max(0, math.ceil(epoch) - 1)
        return begun + round((epoch - begun) * max_steps) / self.steps_per_epoch

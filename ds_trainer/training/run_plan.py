"""How long a run is: rounds, steps and epochs, as pure arithmetic."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.position import DataPosition
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
        planned_steps: ``max_steps`` of a run with these sizes from its beginning; another one where a run that goes on
            has been through some of its epochs with another global batch.
    """

    rounds_per_epoch: int | None
    steps_per_epoch: int
    accumulation: int
    max_steps: int
    epochs: int
    planned_steps: int = -1

    def __post_init__(self) -> None:
        if self.planned_steps < 0:
            object.__setattr__(self, "planned_steps", self.max_steps)

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

    def rounds_after(self, rounds: int) -> int:
        """Micro-batches of each replica in the step that follows ``rounds`` micro-batches of an epoch."""
        if self.rounds_per_epoch is None:
            return self.accumulation
        return max(0, min(self.accumulation, self.rounds_per_epoch - rounds))

    def epoch_after(self, epoch: int, steps: int, rounds: int) -> float:
        """Epochs done after ``steps`` steps, which were ``rounds`` micro-batches, of epoch ``epoch``."""
        if self.rounds_per_epoch is None:
            return epoch + steps / self.steps_per_epoch
        return epoch + min(1.0, rounds / self.rounds_per_epoch)

    def with_another_batch(self, args: TrainingArguments, epoch: int, rounds: int, global_step: int) -> RunPlan:
        """The plan of a run that has done ``global_step`` steps with another global batch.

        Args:
            args: the arguments: ``max_steps`` counts all steps, ``num_train_epochs`` all passes over the data.
            epoch: the epoch that is gone on with.
            rounds: micro-batches of it that need not be done any more.
            global_step: steps done.
        """
        if self.rounds_per_epoch is None:
            return self
        left = math.ceil(max(0, self.rounds_per_epoch - rounds) / self.accumulation)
        if args.max_steps > 0:
            max_steps = self.max_steps
        elif args.num_train_epochs >= epoch + 1:
            max_steps = global_step + left + math.ceil((args.num_train_epochs - epoch - 1) * self.steps_per_epoch)
        else:
            done = self.steps_per_epoch - left
            last = math.ceil((args.num_train_epochs - epoch) * self.steps_per_epoch)
            max_steps = global_step + max(0, last - done)
        epochs = epoch + 1 + math.ceil(max(0, max_steps - global_step - left) / self.steps_per_epoch)
        return replace(self, max_steps=max_steps, epochs=epochs)

    def position(self, global_step: int, epoch: float) -> DataPosition:
        """Where a run stands that has done ``global_step`` steps, at ``epoch``, and has not said more.

        Of data without length, only steps and the number of the epoch are known; ``epoch`` must be a fraction of a run
        of this length.
        """
        if self.rounds_per_epoch is not None:
            begun, steps = divmod(global_step, self.steps_per_epoch)
        else:
            begun = max(0, math.ceil(epoch) - 1)
            steps = round((epoch - begun) * self.steps_per_epoch)
        return DataPosition(begun, steps=steps, rounds=steps * self.accumulation)

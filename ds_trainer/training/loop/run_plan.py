"""The length of a run in micro-steps, steps and epochs."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from ds_trainer.arguments.accelerator_config import replica_batch_size
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.position import DataPosition
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError


def batch_plan_of(args: TrainingArguments, layout: ParallelLayout) -> BatchPlan:
    """The sizes of the training batches that ``args`` request."""
    micro_batch = replica_batch_size(args, "per_device_train_batch_size", layout.dp)
    return BatchPlan(layout, micro_batch, args.gradient_accumulation_steps, args.dataloader_drop_last)


def evaluation_plan_of(args: TrainingArguments, layout: ParallelLayout) -> BatchPlan:
    """The sizes of the evaluation batches that ``args`` request."""
    return BatchPlan(layout, replica_batch_size(args, "per_device_eval_batch_size", layout.dp), whole_batches=True)


@dataclass(frozen=True)
class RunPlan:
    """The length of a run.

    Attributes:
        micro_steps_per_epoch: micro-steps in one epoch; None if the length of the data is unknown.
        steps_per_epoch: optimizer steps in one epoch; the last step may have fewer micro-steps. If the length of the
            data is unknown, this is ``max_steps``, so that the fraction of the epoch is that of the run.
        accumulation: micro-steps in a full step.
        max_steps: optimizer steps of the whole run.
        epochs: number of epochs, including an incomplete last one; unlimited if the length of the data is unknown.
        planned_steps: ``max_steps`` of a run that has had these sizes from its beginning. Differs from ``max_steps``
            in a resumed run that has done some steps with another global batch size.
    """

    micro_steps_per_epoch: int | None
    steps_per_epoch: int
    accumulation: int
    max_steps: int
    epochs: int
    planned_steps: int = -1

    def __post_init__(self) -> None:
        if self.planned_steps < 0:
            object.__setattr__(self, "planned_steps", self.max_steps)

    @classmethod
    def of(cls, args: TrainingArguments, micro_steps_per_epoch: int | None) -> RunPlan:
        """The plan for epochs of ``micro_steps_per_epoch``, with ``max_steps`` if positive, or ``num_train_epochs``.

        Raises:
            ConfigError: neither the length of an epoch nor ``max_steps`` is given.
        """
        accumulation = args.gradient_accumulation_steps
        if micro_steps_per_epoch is None:
            if args.max_steps <= 0:
                raise ConfigError(
                    f"The training data has no length, and max_steps={args.max_steps}: set max_steps to the number of "
                    "optimizer steps."
                )
            return cls(None, args.max_steps, accumulation, args.max_steps, sys.maxsize)
        steps_per_epoch = max(1, math.ceil(micro_steps_per_epoch / accumulation))
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
        return cls(
            micro_steps_per_epoch, steps_per_epoch, accumulation, max_steps, math.ceil(max_steps / steps_per_epoch)
        )

    @classmethod
    def of_values(cls, values: tuple[int, int, int, int, int, int | None, int], accumulation: int) -> RunPlan:
        """The plan that ``Trainer.set_initial_training_values`` describes."""
        epochs, steps_per_epoch, _, _, _, micro_steps_per_epoch, max_steps = values
        return cls(micro_steps_per_epoch, steps_per_epoch, accumulation, max_steps, epochs)

    def micro_steps_after(self, micro_steps: int) -> int:
        """Number of micro-steps in the step that follows ``micro_steps`` micro-steps of an epoch."""
        if self.micro_steps_per_epoch is None:
            return self.accumulation
        return max(0, min(self.accumulation, self.micro_steps_per_epoch - micro_steps))

    def epoch_after(self, epoch: int, steps: int, micro_steps: int) -> float:
        """Epochs done (a fraction) after ``steps`` steps with ``micro_steps`` micro-steps in epoch ``epoch``."""
        if self.micro_steps_per_epoch is None:
            return epoch + steps / self.steps_per_epoch
        return epoch + min(1.0, micro_steps / self.micro_steps_per_epoch)

    def with_another_batch(self, args: TrainingArguments, epoch: int, micro_steps: int, global_step: int) -> RunPlan:
        """The plan of a run that has done ``global_step`` steps with another global batch size.

        Args:
            args: the arguments; ``max_steps`` and ``num_train_epochs`` count from the beginning of the run.
            epoch: the epoch in which the run resumes.
            micro_steps: micro-steps of this epoch that are already done.
            global_step: steps done.
        """
        if self.micro_steps_per_epoch is None:
            return self
        left = math.ceil(max(0, self.micro_steps_per_epoch - micro_steps) / self.accumulation)
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
        """The data position of a run that has recorded only its ``global_step`` and ``epoch``.

        For data without length, only the steps and the number of the epoch are known. Then ``epoch`` must be a fraction
        of a run of this length.
        """
        if self.micro_steps_per_epoch is not None:
            begun, steps = divmod(global_step, self.steps_per_epoch)
        else:
            begun = max(0, math.ceil(epoch) - 1)
            steps = round((epoch - begun) * self.steps_per_epoch)
        return DataPosition(begun, steps=steps, micro_steps=steps * self.accumulation)

"""What a user is told about a resumed run: a table of the arguments that have changed, and that a run is finished."""

from __future__ import annotations

import copy
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.arguments.serialize import plain
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.position import DataPosition
from ds_trainer.optim.schedule_stepping import steps_on_metric
from ds_trainer.training.resume.compatibility import Changes, shown
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

WIDTH = 100
"""Columns of the table."""
_NAME_WIDTH, _VALUE_WIDTH = 39, 16  # at most

# About this start of the run rather than about the run, or set from another argument.
_NOT_COMPARED = frozenset(
    {
        *("output_dir", "resume_from_checkpoint", "auto_resume", "strict_resume", "allow_changed_on_resume"),
        *("start_from_weights", "local_rank", "do_train", "do_eval", "do_predict", "hub_token"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "greater_is_better"),
        "deepspeed",  # its keys are compared
    }
)
_LENGTH = ("max_steps", "num_train_epochs")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "accelerator_config")
_LAYOUT = (
    *("ranks", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_size", "expert_parallel_size"),
)
_SHARDING = ("zero_stage", "offload_optimizer", "offload_param")
_SEEDS = ("seed", "data_seed")
_ORDER = ("train_sampling_strategy", "length_column_name", "sortish_sampler")
_SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
_OPTIMIZER = ("optim", "optimizer", "optim_target_modules", "deepspeed.optimizer.type")


logger = get_logger(__name__)


class ArgumentRow(NamedTuple):
    """An argument that has changed: its name, both values, and what follows."""

    name: str
    before: Any
    now: Any
    follows: str


@dataclass(frozen=True)
class Consequences:
    """What follows from changed arguments in a resumed run. Pairs are of the old and the new value.

    Attributes:
        changes: the differences of the compatibility fingerprints.
        args: the arguments of this run.
        world_size: numbers of ranks.
        max_steps: optimizer steps of the whole run.
        step: optimizer steps done.
        position: position in the data.
        rates: the learning rates of the next step, as text.
    """

    changes: Changes
    args: TrainingArguments
    world_size: tuple[int, int]
    max_steps: tuple[int, int]
    step: int
    position: DataPosition
    rates: str

    def rows(self, before: Mapping[str, Any]) -> list[ArgumentRow]:
        """A row for each argument that the user has changed.

        Args:
            before: the arguments of the run that wrote the checkpoint, as plain data.
        """
        return [ArgumentRow(name, *values, self._follows(name)) for name, values in self._changed(before)]

    def _changed(self, before: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
        now = self.args.to_dict()
        for name, value in now.items():
            if name in _NOT_COMPARED or name not in before or (before[name] or None) == (value or None):
                continue
            follows_logging = all(values["eval_steps"] == values["logging_steps"] for values in (before, now))
            if name != "eval_steps" or not follows_logging:
                yield name, (before[name], value)
        if self.world_size[0] != self.world_size[1]:
            yield "ranks", self.world_size
        for name, values in self.changes.values.items():
            if name in ("train_dataset", "optimizer") or name.startswith(("deepspeed.", "distillation.")):
                yield name, (plain(values[0]), plain(values[1]))

    # -- consequences -------------------------------------------------------------------------------------------------

    def _follows(self, name: str) -> str:
        new_schedule = self.changes.schedule and f"the schedule is computed anew: {self._next_rate}"
        if name == "num_train_epochs" and self.args.max_steps > 0:
            return f"none: max_steps={self.args.max_steps} decides"
        if name in _LENGTH:
            schedule = f"; the schedule too: {self._next_rate}" if "max_steps" in self.changes.values else ""
            return self._length + schedule
        if name in (*_BATCH, *_LAYOUT):
            if "global_batch" not in self.changes.values:
                return "the global batch stays the same"
            before, now = self.changes.values["global_batch"]
            continues = "" if self.args.ignore_data_skip else f", from {self._place} on"
            return f"the global batch was {counted(before, 'sample')}, is {now}{continues}; {self._length}"
        if name in _SHARDING:
            return "the state is resharded"
        if name == "train_dataset":
            return f"samples used in an epoch; {self._new_order}; {self._length}"
        if name in _SEEDS:
            texts = ["random states are those of the checkpoint"] if name == "seed" else []
            if "data_seed" in self.changes.values:
                texts.append(f"the order of samples is another one from epoch {self.position.epoch + self._inside} on")
            return "; ".join(texts) or "none: the order of samples stays the same"
        if name in _ORDER:
            return self._new_order
        if name in _OPTIMIZER:
            return "the optimizer's states are new" if self.changes.optimizer else "the optimizer's states are restored"
        if new_schedule and (name in _SCHEDULE or name.startswith(("deepspeed.scheduler.", "deepspeed.optimizer."))):
            return new_schedule
        return f"from step {self.step + 1} on"

    @property
    def _next_rate(self) -> str:
        return f"learning rate {self.rates} at step {self.step + 1}"

    @property
    def _length(self) -> str:
        before, now = self.max_steps
        return (
            f"the run was {counted(before, 'step')}, is {now}"
            if before != now
            else f"the run still has {counted(now, 'step')}"
        )

    @property
    def _place(self) -> str:
        at = self.position
        return f"sample {at.samples + 1} of epoch {at.epoch}"

    @property
    def _inside(self) -> bool:
        """Whether the run continues in the middle of an epoch."""
        return self.position.samples > 0 and not self.position.ended and not self.args.ignore_data_skip

    @property
    def _new_order(self) -> str:
        if not self._inside:
            return "the samples come in another order"
        return (
            f"the order of samples is another one from {self._place} on, so that in this epoch some may come again and "
            "some not at all"
        )


def finished(args: TrainingArguments, step: int, checkpoint: Path) -> list[str]:
    """The lines that say that a run has nothing left to train, and how to extend it.

    Args:
        args: the arguments of the run.
        step: optimizer steps done.
        checkpoint: where it resumed.
    """
    name: str
    value: float
    if args.max_steps > 0:
        name, value = "max_steps", 2 * step
    else:
        name, value = "num_train_epochs", math.floor(args.num_train_epochs) + 1
    inside = checkpoint.parent.resolve() == Path(str(args.output_dir)).resolve()
    path, done = str(checkpoint), counted(step, "step")
    return [
        f"The run is finished after {done} ({name}={getattr(args, name)}, {args.where(name)}): nothing is",
        f"trained. To continue it, raise {name}:",
        f"  Python        TrainingArguments(..., {name}={value}) and "
        f"train(resume_from_checkpoint={True if inside else repr(path)})",
        f"  command line  --{name} {value} {'--auto_resume True' if inside else f'--resume_from_checkpoint {path}'}",
        *([f"  of a recipe   --arguments.{name} {value} --arguments.auto_resume True"] if inside else []),
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def table(rows: Sequence[ArgumentRow]) -> list[str]:
    """``rows`` as lines of at most :data:`WIDTH` columns; none if nothing has changed."""
    if not rows:
        return []
    cells: list[tuple[str, ...]] = [("argument", "was", "is", "what follows")]
    for index, row in enumerate(rows):
        follows = "as above" if index and rows[index - 1].follows == row.follows else row.follows
        values = (_cut(shown(value), _VALUE_WIDTH) for value in (row.before, row.now))
        cells.append((_cut(row.name, _NAME_WIDTH), *values, follows))
    return ["Changed since then:", *_columns(cells)]


def _columns(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    left = WIDTH - 2 - sum(widths) - 2 * len(widths)
    lines = []
    for row in cells:
        head = "".join(f"{text:<{width}}  " for text, width in zip(row[:3], widths, strict=True))
        first, *rest = textwrap.wrap(row[3], left)
        lines.append(f"  {head}{first}")
        lines += [" " * (2 + len(head)) + line for line in rest]
    return lines


def move_schedule(schedule: Any, saved: Mapping[str, Any], steps: int) -> None:
    """Move a new ``schedule`` to the step at which the old one was ``saved``.

    Args:
        schedule: a new schedule that has not been stepped.
        saved: the state of the old schedule, with its number of steps.
        steps: optimizer steps done, used if ``saved`` has no number of steps.
    """
    if steps_on_metric(schedule):
        logger.warning("The new schedule (%s) follows a metric and starts fresh.", type(schedule).__name__)
        return
    if "num_bad_epochs" in saved:  # it followed a metric, and counted evaluations
        saved = {}
    done = int(saved.get("last_epoch", saved.get("last_batch_iteration", steps)))
    if done <= 0:
        return
    if "last_batch_iteration" in inspect.signature(schedule.step).parameters:  # a schedule of DeepSpeed
        schedule.step(done)
    elif isinstance(schedule, LambdaLR):  # a function of the step only
        schedule.last_epoch = done - 1
        schedule._step_count = done + 1
        schedule.step()
    else:
        for _ in range(done):
            schedule.step()


class MovedSchedule:
    """A schedule where it has been moved to, so that a rollback can put it back there.

    Args:
        schedule: the moved schedule.
        optimizer: its optimizer.
    """

    def __init__(self, schedule: Any, optimizer: torch.optim.Optimizer) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = copy.deepcopy(schedule.state_dict())
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Put schedule and learning rates back. A learning rate that is a tensor stays the same object."""
        self._schedule.load_state_dict(copy.deepcopy(self._state))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

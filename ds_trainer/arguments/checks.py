"""What is wrong with a set of arguments, taken by itself: types, ranges, contradictions. All problems at once."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.enums import AutocastDtype, IntervalStrategy, OffloadDevice, OptimizerNames, SchedulerType
from ds_trainer.utils.errors import did_you_mean
from ds_trainer.utils.sizes import parse_size

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments

_POSITIVE_INTEGERS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_size",
)
_NOT_NEGATIVE = (
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "adam_epsilon",
    "max_grad_norm",
    "eval_delay",
    "dataloader_num_workers",
)
_FRACTIONS = ("adam_beta1", "adam_beta2")
_INTERVALS = ("logging", "eval", "save")
_CHOICES: dict[str, type[Enum]] = {
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "torch_autocast": AutocastDtype,
    "offload_optimizer": OffloadDevice,
    "logging_strategy": IntervalStrategy,
    "eval_strategy": IntervalStrategy,
    "save_strategy": IntervalStrategy,
}
_BOOLEANS = (
    "bf16",
    "fp16",
    "logging_first_step",
    "dataloader_drop_last",
    "dataloader_pin_memory",
    "remove_unused_columns",
    "use_cpu",
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def argument_problems(args: TrainingArguments) -> list[str]:
    """One sentence for each value that cannot work, naming the field, the value and the remedy."""
    problems: list[str] = []
    for name in _POSITIVE_INTEGERS:
        value = getattr(args, name)
        if not _is_integer(value) or value < 1:
            problems.append(f"{name}={value!r} must be a positive integer.")
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if not _is_number(value) or not value >= 0:
            problems.append(f"{name}={value!r} must be a number that is not negative.")
    for name in _FRACTIONS:
        value = getattr(args, name)
        if not _is_number(value) or not 0 <= value < 1:
            problems.append(f"{name}={value!r} must be a number from 0 up to, but not including, 1.")
    for name in _BOOLEANS:
        value = getattr(args, name)
        if not isinstance(value, bool):
            problems.append(f"{name}={value!r} must be true or false.")
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        known = [str(choice.value) for choice in choices]
        if str(value) not in known:
            problems.append(f"{name}={value!r} is not one of {', '.join(known)}.{did_you_mean(str(value), known)}")
    problems += _length_problems(args)
    problems += _interval_problems(args)
    problems += _precision_problems(args)
    return problems


def _length_problems(args: TrainingArguments) -> list[str]:
    problems = []
    if not _is_integer(args.max_steps):
        problems.append(f"max_steps={args.max_steps!r} must be an integer (-1: use num_train_epochs).")
    elif args.max_steps <= 0 and (not _is_number(args.num_train_epochs) or not args.num_train_epochs > 0):
        problems.append(
            f"num_train_epochs={args.num_train_epochs!r} must be a positive number, or set max_steps to the number of "
            "optimizer steps."
        )
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        if (value is not None or name == "seed") and (not _is_integer(value) or value < 0):
            problems.append(f"{name}={value!r} must be an integer that is not negative.")
    if args.save_total_limit is not None and (not _is_integer(args.save_total_limit) or args.save_total_limit < 1):
        problems.append(f"save_total_limit={args.save_total_limit!r} must be a positive integer or None (keep all).")
    if args.gradient_checkpointing not in (None, True, False):
        problems.append(f"gradient_checkpointing={args.gradient_checkpointing!r} must be true, false or None.")
    try:
        parse_size(args.max_shard_size)
    except (ValueError, AttributeError):
        problems.append(f"max_shard_size={args.max_shard_size!r} is no size; write it like '5GB' or '200MB'.")
    for part in (args.optim_args or "").replace(" ", "").split(","):
        if part and "=" not in part:
            problems.append(f"optim_args={args.optim_args!r}: '{part}' is not of the form name=value.")
    return problems


def _interval_problems(args: TrainingArguments) -> list[str]:
    problems = []
    for what in _INTERVALS:
        name = f"{what}_steps"
        value = getattr(args, name)
        if value is None and what == "eval":
            continue
        if str(getattr(args, f"{what}_strategy")) != "steps":
            continue
        if not _is_number(value) or not value > 0:
            problems.append(f"{name}={value!r} must be positive: steps, or below 1 a fraction of all steps.")
        elif value > 1 and value != int(value):
            problems.append(f"{name}={value!r} must be a whole number of steps, or below 1 a fraction of all steps.")
    return problems


def _precision_problems(args: TrainingArguments) -> list[str]:
    problems = []
    asked = [name for name in ("bf16", "fp16") if getattr(args, name) is True]
    if str(args.torch_autocast) in ("bf16", "fp16"):
        asked.append(f"torch_autocast={args.torch_autocast}")
    if len(asked) > 1:
        problems.append(f"{' and '.join(asked)} are different precisions; keep one of them.")
    stage = args.zero_stage
    if stage is not None and (not _is_integer(stage) or stage not in (0, 1, 2, 3)):
        problems.append(f"zero_stage={stage!r} must be 0, 1, 2, 3, or None (0 on one rank, 1 on several).")
    elif str(args.offload_optimizer) == "cpu" and stage == 0:
        problems.append("offload_optimizer=cpu needs ZeRO: set zero_stage to 1, 2 or 3 (it is 0).")
    return problems

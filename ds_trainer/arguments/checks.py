"""What is wrong with a set of arguments, taken by itself: types, ranges, contradictions. All problems at once."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import typing
from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.divergence import divergence_problems
from ds_trainer.arguments.enums import (
    AutocastDtype,
    DebugOption,
    DivergencePolicy,
    GenerationGather,
    GradientDtype,
    HangAction,
    HubStrategy,
    IntervalStrategy,
    LogLevel,
    OffloadDevice,
    OptimizerNames,
    SamplingStrategy,
    SaveFailure,
    SaveStrategy,
    SchedulerType,
    SelfTest,
    TokenCount,
    VerifyWeights,
    WorkerStart,
)
from ds_trainer.arguments.evaluation import evaluation_problems
from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.secrets import is_secret, masked, without_secrets
from ds_trainer.utils.sizes import parse_size

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments

CHOICES: dict[str, type[Enum]] = {
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "torch_autocast": AutocastDtype,
    "communication_data_type": GradientDtype,
    "grad_accum_dtype": GradientDtype,
    "offload_optimizer": OffloadDevice,
    "offload_param": OffloadDevice,
    "logging_strategy": IntervalStrategy,
    "eval_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "train_sampling_strategy": SamplingStrategy,
    "log_level": LogLevel,
    "log_level_replica": LogLevel,
    "dataloader_multiprocessing_context": WorkerStart,
    "generation_gather": GenerationGather,
    "save_failure": SaveFailure,
    "self_test": SelfTest,
    "verify_weights": VerifyWeights,
    "hang_action": HangAction,
    "nonfinite_policy": DivergencePolicy,
    "loss_spike_policy": DivergencePolicy,
}
_WHOLE = "a positive integer"
_NOT_NEGATIVE = "a number that is not negative"
_FRACTION = "a number from 0 up to, but not including, 1"
_RANGES: dict[str, str] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "tensor_parallel_size",
            "context_parallel_size",
            "sequence_parallel_size",
            "torch_empty_cache_steps",
            "save_keep_every",
            "loss_spike_window",
            "divergence_window",
            "eval_accumulation_steps",
            "dataloader_prefetch_factor",
            "ddp_timeout",
            "generation_max_length",
            "generation_num_beams",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(
        (
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "adam_epsilon",
            "max_grad_norm",
            "eval_delay",
            "dataloader_num_workers",
            "neftune_noise_alpha",
            "time_limit_margin",
            *("hang_timeout", "hang_factor", "straggler_steps"),
            "divergence_limit",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), _FRACTION),
}
# Our sizes by the names of accelerate's ParallelismConfig.
PARALLEL_SIZES = {
    "tensor_parallel_size": "tp_size",
    "context_parallel_size": "cp_size",
    "sequence_parallel_size": "sp_size",
}


# -- types -----------------------------------------------------------------------------------------------------------


def type_problems(args: Any) -> list[str]:
    """One sentence for each field whose value does not fit its type."""
    problems = []
    cls: Any = type(args)
    for name, hint in _hints(cls).items():
        value = getattr(args, name)
        if name in CHOICES:
            continue  # a wrong name is answered with the right ones, not with a type
        try:
            read_as(_located(value, hint), hint)
        except RecursionError:
            problems.append(f"{name}: a mapping nested without end; does it contain itself?")
        except WrongType as error:
            secret = is_secret(name)
            shown = f"{masked(name)}: expected {describe(hint)}" if secret else f"{without_secrets(value)!r}: {error}"
            problems.append(f"{name}={shown}.")
    return problems


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Hints of the fields that this package declares; those of a user's subclass are the user's."""
    hints: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent.__module__.startswith("ds_trainer.") and dataclasses.is_dataclass(parent):
            known = typing.get_type_hints(parent)
            hints.update({item.name: known[item.name] for item in dataclasses.fields(parent)})
    return hints


def _located(value: Any, hint: Any) -> Located:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, dict):
        return Located({key: _located(entry, Any) for key, entry in value.items()}, "")
    if isinstance(value, list | tuple | set):
        return Located([_located(entry, Any) for entry in value], "")
    return Located(value, "", value if hint is float and isinstance(value, str) else None)


# -- values ----------------------------------------------------------------------------------------------------------


def argument_problems(args: Any) -> list[str]:
    """One sentence for each value that cannot work, naming the field, the value and the remedy. Types are right."""
    problems: list[str] = []
    for name, wanted in _RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not _in_range(value, wanted):
            problems.append(f"{name}={value!r} must be {wanted}.")
    for name, choices in CHOICES.items():
        if hasattr(args, name):
            problems += _choice_problems(name, getattr(args, name), choices)
    problems += _length_problems(args)
    problems += _interval_problems(args)
    problems += _text_problems(args)
    problems += _combination_problems(args)
    problems += evaluation_problems(args)
    problems += divergence_problems(args)
    return problems


def _in_range(value: Any, wanted: str) -> bool:
    number = float(value)
    if wanted == _WHOLE:
        return number >= 1
    if wanted == _NOT_NEGATIVE:
        return number >= 0 and math.isfinite(number)
    return 0 <= number < 1


def _choice_problems(name: str, value: Any, choices: type[Enum]) -> list[str]:
    known = [str(choice.value) for choice in choices]
    if value is None and name == "dataloader_multiprocessing_context":
        return []
    if str(value) in known:
        return []
    listed = ", ".join(known) if len(known) <= 16 else f"the {len(known)} of {choices.__name__}"
    return [f"{name}={value!r} is not one of {listed}.{did_you_mean(str(value), known)}"]


def _length_problems(args: TrainingArguments) -> list[str]:
    problems = []
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        problems.append(
            f"num_train_epochs={args.num_train_epochs!r} must be a positive number, or set max_steps to the number of "
            "optimizer steps."
        )
    if args.warmup_steps > 1 and args.warmup_steps != int(args.warmup_steps):
        problems.append(
            f"warmup_steps={args.warmup_steps!r} must be a whole number of steps, or below 1 a fraction of all steps."
        )
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        if value is not None and value < 0:
            problems.append(f"{name}={value!r} must be an integer that is not negative.")
    return problems + _limit_problems(args.save_total_limit)


def _limit_problems(limit: int | str | None) -> list[str]:
    said = f"save_total_limit={limit!r} must be a positive integer or None (keep all)"
    if isinstance(limit, str):
        try:
            parse_size(limit)
        except ValueError:
            return [f"{said}, or a size as '500GB' or '200MB'."]
    elif limit is not None and limit < 1:
        return [f"{said}."]
    return []


def _interval_problems(args: TrainingArguments) -> list[str]:
    problems = []
    for what in ("logging", "eval", "save"):
        name = f"{what}_steps"
        value = getattr(args, name)
        if (value is None and what == "eval") or str(getattr(args, f"{what}_strategy")) != "steps":
            continue
        if not value > 0:
            problems.append(f"{name}={value!r} must be positive: steps, or below 1 a fraction of all steps.")
        elif value > 1 and value != int(value):
            problems.append(f"{name}={value!r} must be a whole number of steps, or below 1 a fraction of all steps.")
    return problems


def _text_problems(args: TrainingArguments) -> list[str]:
    problems = []
    try:
        parse_size(args.max_shard_size)
    except (ValueError, AttributeError):
        problems.append(f"max_shard_size={args.max_shard_size!r} is no size; write it like '5GB' or '200MB'.")
    for part in (args.optim_args or "").replace(" ", "").split(","):
        if part and "=" not in part:
            problems.append(f"optim_args={args.optim_args!r}: '{part}' is not of the form name=value.")
    kwargs = ("lr_scheduler_kwargs", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    for name in (*kwargs, "model_init_kwargs"):
        problems += _json_problems(name, getattr(args, name))
    problems += [
        f"debug={args.debug!r}: '{word}' is not one of {', '.join(str(option.value) for option in DebugOption)}."
        for word in (args.debug.split() if isinstance(args.debug, str) else map(str, args.debug or ()))
        if word not in [option.value for option in DebugOption]
    ]
    counted = args.include_num_input_tokens_seen
    if not isinstance(counted, bool):
        problems += _choice_problems("include_num_input_tokens_seen", counted, TokenCount)
    return problems


def _json_problems(name: str, value: Any) -> list[str]:
    if not isinstance(value, str):
        return []
    try:
        if isinstance(json.loads(value), dict):
            return []
    except ValueError as error:
        return [f"{name}={value!r} is no JSON ({error}); write it like '{{\"name\": 1}}'."]
    return [f"{name}={value!r} must be a mapping in JSON, like '{{\"name\": 1}}'."]


# -- combinations ----------------------------------------------------------------------------------------------------


def _combination_problems(args: TrainingArguments) -> list[str]:
    problems = []
    asked = [name for name in ("bf16", "fp16") if getattr(args, name)]
    if str(args.torch_autocast) in ("bf16", "fp16"):
        asked.append(f"torch_autocast={args.torch_autocast}")
    if len(asked) > 1:
        problems.append(f"{' and '.join(asked)} are different precisions; keep one of them.")
    if args.zero_stage is not None and args.zero_stage not in (0, 1, 2, 3):
        problems.append(
            f"zero_stage={args.zero_stage!r} must be 0, 1, 2, 3, or None (1 on several ranks and in fp16, else 0)."
        )
    if args.dataloader_num_workers == 0:
        for name, off in (
            ("dataloader_prefetch_factor", None),
            ("dataloader_persistent_workers", False),
            ("dataloader_multiprocessing_context", None),
        ):
            if getattr(args, name) != off:
                problems.append(
                    f"{name}={getattr(args, name)!r} is about loading processes, but dataloader_num_workers=0 starts "
                    "none. Set dataloader_num_workers to 1 or more."
                )
    if str(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy") and str(args.eval_strategy) == "no":
        problems.append(
            f"lr_scheduler_type={args.lr_scheduler_type} follows a metric, but eval_strategy=no: there would be none. "
            "Set eval_strategy to steps or epoch."
        )
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        new = old.replace("gradient", "activation")
        values = getattr(args, old), getattr(args, new)
        if None not in values and values[0] != values[1]:
            problems.append(f"{old}={values[0]!r} and {new}={values[1]!r} are two names of one thing; keep the second.")
    return problems + _parallel_problems(args) + _rank_problems(args)


def parallel_sizes(config: Any) -> dict[str, int | None]:
    """The sizes in a ``parallelism_config`` (an object of accelerate's class or a mapping), by accelerate's names."""
    names = ("dp_replicate_size", "dp_shard_size", *PARALLEL_SIZES.values())
    if config is None:
        return {}
    if isinstance(config, dict):
        return {name: config.get(name) for name in names}
    return {name: getattr(config, name, None) for name in names}


def _parallel_problems(args: TrainingArguments) -> list[str]:
    config = args.parallelism_config
    if config is None:
        return []
    known = {"dp_replicate_size", "dp_shard_size", *PARALLEL_SIZES.values(), "cp_backend", "sp_backend"}
    known |= {"tp_handler", "cp_handler", "sp_handler"}
    if not isinstance(config, dict) and not hasattr(config, "tp_size"):
        return [f"parallelism_config={config!r} is neither accelerate's ParallelismConfig nor a mapping."]
    problems = [
        f"parallelism_config: '{name}' is not known.{did_you_mean(name, known)}"
        for name in (config if isinstance(config, dict) else ())
        if name not in known
    ]
    for name, size in parallel_sizes(config).items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            problems.append(f"parallelism_config: {name}={size!r} must be a positive integer.")
    for field, key in PARALLEL_SIZES.items():
        own, theirs = getattr(args, field), parallel_sizes(config).get(key)
        if theirs is not None and own not in (1, theirs):
            problems.append(f"{field}={own} and parallelism_config.{key}={theirs} contradict each other; keep one.")
    return problems


def _rank_problems(args: TrainingArguments) -> list[str]:
    if args.local_rank == -1:
        return []
    try:
        info = resolve_ranks(os.environ)
    except ConfigError as error:
        return error.problems
    if args.local_rank == info.local_rank:
        return []
    return [
        f"local_rank={args.local_rank}, but the environment (launcher: {info.launcher}) says {info.local_rank}. Leave "
        "local_rank out, or start with `deepspeed`, `torchrun` or `srun`."
    ]

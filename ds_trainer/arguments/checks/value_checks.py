"""Checks of argument values: ranges, closed lists, and combinations that contradict each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from enum import Enum
from typing import Any

from ds_trainer.arguments.compat.dict_fields import dict_field_problems
from ds_trainer.arguments.enums import CHOICES, DebugOption, SchedulerType, TokenCount
from ds_trainer.arguments.parallelism_config import parallelism_config_problems
from ds_trainer.arguments.redefined import is_redefined, packs
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import parse_json, path_problem, shortened
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.units import parse_size, parse_tokens

_MOST_WORKERS = 1024
_POSITIVE_INTEGER = "a positive integer"
_NOT_NEGATIVE = "a number that is not negative"
_FRACTION = "a number of at least 0 and below 1"
_RANGES: dict[str, str] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "tensor_parallel_size",
            "context_parallel_size",
            "sequence_parallel_size",
            "expert_parallel_size",
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
        _POSITIVE_INTEGER,
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
            *("hang_timeout", "hang_factor", "straggler_steps", "profile_steps", "report_device_hour_price"),
            "divergence_limit",
            *("loss_chunk_tokens", "z_loss_factor", "length_buckets"),
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), _FRACTION),
}
_RATE_OF_A_TYPO = 1e4  # 2e5 instead of 2e-5; no optimizer takes as much
_REMEDIES = {"torch_empty_cache_steps": " (steps between two calls); leave it out to keep the cache"}


def argument_problems(args: Any) -> Iterator[str]:
    """One sentence for each invalid value or combination: field, value and remedy. Types must be right."""
    yield from value_problems(args)
    yield from _combination_problems(args)
    yield from evaluation_problems(args)
    yield from _divergence_problems(args)
    yield from _packing_problems(args)


def value_problems(args: Any) -> Iterator[str]:
    """One sentence for each value that is invalid whatever the other arguments are."""
    for name, wanted in _RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not _in_range(value, wanted):
            yield f"{name}={value!r} must be {wanted}{_REMEDIES.get(name, '')}."
    for name, choices in CHOICES.items():
        if hasattr(args, name) and not is_redefined(args, name):
            yield from _choice_problems(name, getattr(args, name), choices)
    yield from _number_problems(args)
    yield from _interval_problems(args)
    yield from _text_problems(args)
    yield from _output_problems("" if args.output_dir is None else os.fspath(args.output_dir), args.output_dir is None)
    yield from dict_field_problems(args)


def _in_range(value: Any, wanted: str) -> bool:
    number = float(value)
    if wanted == _POSITIVE_INTEGER:
        return number >= 1
    if wanted == _NOT_NEGATIVE:
        return number >= 0 and math.isfinite(number)
    return 0 <= number < 1


def _choice_problems(name: str, value: Any, choices: type[Enum]) -> Iterator[str]:
    known = [str(choice.value) for choice in choices]
    may_be_none = name == "dataloader_multiprocessing_context"
    if str(value) not in known and not (value is None and may_be_none):
        listed = ", ".join(known) if len(known) <= 16 else f"the {len(known)} of {choices.__name__}"
        yield f"{name}={value!r} is not one of {listed}.{did_you_mean(str(value), known)}"


def _number_problems(args: Any) -> Iterator[str]:
    if args.zero_stage is not None and args.zero_stage not in (0, 1, 2, 3):
        yield (f"zero_stage={args.zero_stage!r} must be 0, 1, 2, 3, or None (1 on several ranks and in fp16, else 0).")
    factor = args.loss_spike_factor
    if factor is not None and not (math.isfinite(factor) and factor > 1):
        yield f"loss_spike_factor={factor!r} must be a finite number above 1, or None (no detection)."
    if _RATE_OF_A_TYPO <= float(args.learning_rate) < math.inf:
        yield f"learning_rate={args.learning_rate!r} is a mistake; a typical value is 5e-5 (5 / 100,000)."
    if args.warmup_steps > 1 and not float(args.warmup_steps).is_integer():
        yield (
            f"warmup_steps={args.warmup_steps!r} must be a whole number of steps, or below 1 a fraction of all steps."
        )
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < 2**32:
            limit = "that is not negative" if value < 0 else "below 2**32, as numpy takes it"
            yield f"{name}={value!r} must be an integer {limit}."
    shards = args.stream_shards
    if shards not in (None, "auto", "own") and not (type(shards) is int and shards > 0):
        yield f"stream_shards={shards!r} must be a positive integer, 'auto', 'own' or None."
    yield from _limit_problems(args.save_total_limit)


def _limit_problems(limit: int | str | None) -> Iterator[str]:
    problem = f"save_total_limit={limit!r} must be a positive integer or None (keep all)"
    if isinstance(limit, str):
        try:
            parse_size(limit)
        except ValueError:
            yield f"{problem}, or a size such as '500GB' or '200MB'."
    elif limit is not None and limit < 1:
        yield f"{problem}."


def _interval_problems(args: Any) -> Iterator[str]:
    for action in ("logging", "eval", "save"):
        name = f"{action}_steps"
        value = getattr(args, name)
        if (value is None and action == "eval") or str(getattr(args, f"{action}_strategy")) != "steps":
            continue
        if not value > 0:
            yield f"{name}={value!r} must be positive: steps, or below 1 a fraction of all steps."
        elif value > 1 and not float(value).is_integer():
            yield f"{name}={value!r} must be a whole number of steps, or below 1 a fraction of all steps."


def _text_problems(args: Any) -> Iterator[str]:
    try:
        parse_size(args.max_shard_size)
    except (ValueError, AttributeError):
        yield f"max_shard_size={args.max_shard_size!r} is not a size; write it like '5GB' or '200MB'."
    for part in (args.optim_args or "").replace(" ", "").split(","):
        if part and "=" not in part:
            yield f"optim_args={args.optim_args!r}: '{part}' is not of the form name=value."
    rate = args.optimizer_arguments(own=True).get("gate_bias_rate", 1)
    if type(rate) not in (int, float) or not 0 < rate <= 1:
        yield f"optim_args={args.optim_args!r}: gate_bias_rate must be above 0 and at most 1, such as 0.001."
    kwargs = ("lr_scheduler_kwargs", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    for name in (*kwargs, "model_init_kwargs"):
        yield from _json_problems(name, getattr(args, name))
    known = [str(option.value) for option in DebugOption]
    for option in args.debug.split() if isinstance(args.debug, str) else map(str, args.debug or ()):
        if option not in known:
            yield f"debug={args.debug!r}: '{option}' is not one of {', '.join(known)}."
    token_count = args.include_num_input_tokens_seen
    if not isinstance(token_count, bool):
        yield from _choice_problems("include_num_input_tokens_seen", token_count, TokenCount)


def _output_problems(output_dir: str, is_default: bool) -> Iterator[str]:
    if not is_default and not output_dir.strip():
        yield f"output_dir={output_dir!r} is empty; name a directory ('.' is the working directory)."
    elif problem := path_problem(output_dir):
        yield f"output_dir={shortened(output_dir)!r} {problem}."
    elif os.path.normpath(output_dir or ".") in ("/", "//"):
        yield f"output_dir={output_dir!r} is the root of the file system; name a directory below it."


def _json_problems(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str):
        return
    try:
        if not isinstance(parse_json(value), dict):
            yield f"{name}={value!r} must be a mapping in JSON, like '{{\"name\": 1}}'."
    except ValueError as error:
        yield f"{name}={value!r} is not valid JSON ({error}); write it like '{{\"name\": 1}}'."


# -- combinations ----------------------------------------------------------------------------------------------------


def _combination_problems(args: Any) -> Iterator[str]:
    if args.max_steps < -1:
        yield f"max_steps={args.max_steps} must be a number of optimizer steps, or -1 for num_train_epochs."
    elif args.max_steps <= 0 and not args.num_train_epochs > 0:
        yield (
            f"num_train_epochs={args.num_train_epochs!r} must be a positive number, or set max_steps to the number of "
            "optimizer steps."
        )
    requested = [name for name in ("bf16", "fp16") if getattr(args, name)]
    if str(args.torch_autocast) in ("bf16", "fp16"):
        requested.append(f"torch_autocast={args.torch_autocast}")
    if len(requested) > 1:
        yield f"{' and '.join(requested)} are different precisions; keep one of them."
    if args.dataloader_num_workers == 0:
        for name, off in (
            ("dataloader_prefetch_factor", None),
            ("dataloader_persistent_workers", False),
            ("dataloader_multiprocessing_context", None),
        ):
            if getattr(args, name) != off:
                yield (
                    f"{name}={getattr(args, name)!r} configures data loading workers, but dataloader_num_workers=0 "
                    "starts none. Set dataloader_num_workers to 1 or more."
                )
    # Each is a process; a machine that starts so many does not answer any more.
    if isinstance(args.dataloader_num_workers, int) and args.dataloader_num_workers > _MOST_WORKERS:
        yield f"dataloader_num_workers={args.dataloader_num_workers:,} is more than the {_MOST_WORKERS:,} of a rank."
    if str(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy") and str(args.eval_strategy) == "no":
        yield (
            f"lr_scheduler_type={args.lr_scheduler_type} follows a metric, but eval_strategy=no: no metric is "
            "computed. Set eval_strategy to steps or epoch."
        )
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        new = old.replace("gradient", "activation")
        values = getattr(args, old), getattr(args, new)
        if None not in values and values[0] != values[1]:
            yield (f"{old}={values[0]!r} and {new}={values[1]!r} are two names of one argument; keep the second.")
    yield from parallelism_config_problems(args)
    yield from _rank_problems(args)


def _rank_problems(args: Any) -> Iterator[str]:
    if args.local_rank == -1:
        return
    try:
        info = resolve_ranks(os.environ)
    except ConfigError as error:
        yield from error.problems
        return
    if args.local_rank != info.local_rank:
        yield (
            f"local_rank={args.local_rank}, but the environment (launcher: {info.launcher}) says {info.local_rank}. "
            "Leave local_rank out, or start with `deepspeed`, `torchrun` or `srun`."
        )


def _divergence_problems(args: Any) -> Iterator[str]:
    for name, active in (("nonfinite_policy", True), ("loss_spike_policy", args.loss_spike_factor is not None)):
        if not active or str(getattr(args, name)) != "rollback":
            continue
        for other, value in (("save_strategy", "no"), ("save_only_model", "True")):
            if str(getattr(args, other)) == value:
                yield (
                    f"{name}=rollback returns to a checkpoint, but {other}={value} writes none that a run can resume "
                    f"from. Choose another {other}, or {name}=skip."
                )


DIVERGENCES = ("forward_kl", "reverse_kl")


def distillation_problems(temperature: float, hard_loss_weight: float, divergence: str) -> Iterator[str]:
    """What cannot work, as one sentence per problem.

    Args:
        temperature: divides the logits of student and teacher.
        hard_loss_weight: weight of the cross-entropy with the labels.
        divergence: name of the divergence.
    """
    if not temperature > 0:
        yield f"distillation.temperature={temperature} must be above 0."
    if not 0 <= hard_loss_weight <= 1:
        yield f"distillation.hard_loss_weight={hard_loss_weight} must be between 0 and 1."
    if divergence not in DIVERGENCES:
        yield f"distillation.divergence={divergence!r} is not one of {', '.join(DIVERGENCES)}."


def _packing_problems(args: Any) -> Iterator[str]:
    if not is_redefined(args, "max_length"):
        yield from length_problems(args.max_length)
    if not packs(args):
        if not is_redefined(args, "eval_packing") and args.eval_packing:
            yield "eval_packing=True needs packing=True."
        return
    if str(args.train_sampling_strategy) in ("group_by_length", "batch_rebalance"):
        yield (
            f"train_sampling_strategy={args.train_sampling_strategy} arranges samples by length, but with packing=True "
            "all rows have the same length. Set it to random or sequential, or set packing=False."
        )
    if getattr(args, "sortish_sampler", False):
        yield (
            "sortish_sampler=True arranges samples by length, but with packing=True all rows have the same length. Set "
            "one of them to False."
        )
    if args.use_cache:
        yield (
            "packing=True and use_cache=True: with a key-value cache, models do not keep packed samples apart. Set "
            "use_cache=False."
        )


def length_problems(length: int | str | None) -> Iterator[str]:
    """What is wrong with a ``max_length``."""
    try:
        tokens = parse_tokens(length) if isinstance(length, str) else length
    except ValueError:
        tokens = 0
    if tokens is not None and not tokens > 0:
        yield f"max_length={length!r} must be a positive number of tokens, such as 4096, '64K' or '1M', or None."


# Checks of the evaluation arguments: metrics, and the selection of the best checkpoint.


def evaluation_problems(args: Any) -> Iterator[str]:
    """One sentence for each invalid value."""
    asked = args.include_for_metrics
    for name in [asked] if isinstance(asked, str) else asked:
        if name not in ("inputs", "loss"):
            yield f"include_for_metrics={args.include_for_metrics!r}: '{name}' is neither 'inputs' nor 'loss'."
    if args.bf16_full_eval and args.fp16_full_eval:
        yield "bf16_full_eval and fp16_full_eval are different precisions; keep one of them."
    save_strategy, eval_strategy = str(args.save_strategy), str(args.eval_strategy)
    if save_strategy == "best" and eval_strategy == "no":
        yield (
            "save_strategy=best saves after an evaluation, but eval_strategy=no. Set eval_strategy to steps or epoch."
        )
    if save_strategy == "best" and args.metric_for_best_model is None and not args.load_best_model_at_end:
        yield "save_strategy=best needs a metric: set metric_for_best_model, for example to 'loss'."
    if args.metric_for_best_model is None and args.greater_is_better is not None and not has_default_metric(args):
        yield (
            f"greater_is_better={args.greater_is_better!r} compares metrics, but metric_for_best_model is not set. Set "
            "it, or leave out greater_is_better."
        )
    if args.load_best_model_at_end:
        yield from _best_model_problems(args, save_strategy, eval_strategy)


def has_default_metric(args: Any) -> bool:
    """Whether an argument needs a metric, for which the loss is the default."""
    plateau = str(args.lr_scheduler_type) in (SchedulerType.REDUCE_ON_PLATEAU.value, SchedulerType.GREEDY.value)
    return args.load_best_model_at_end or plateau


def _best_model_problems(args: Any, save_strategy: str, eval_strategy: str) -> Iterator[str]:
    """What ``load_best_model_at_end`` contradicts: every checkpoint must be evaluated just before it is saved."""
    if save_strategy == "best":
        return
    if save_strategy != eval_strategy or eval_strategy == "no":
        yield (
            f"load_best_model_at_end=True needs an evaluation of every checkpoint, but "
            f"eval_strategy={eval_strategy} and save_strategy={save_strategy}. Set both to steps, both to epoch, or "
            "save_strategy to best."
        )
    elif eval_strategy == "steps":
        eval_steps, save_steps = args.eval_steps or args.logging_steps, args.save_steps
        # Fractions are compared as millionths: 0.3 is not a multiple of 0.1 in binary.
        save, every = round(save_steps * 1_000_000), round(eval_steps * 1_000_000)
        if eval_steps > 0 and save_steps > 0 and ((eval_steps < 1) != (save_steps < 1) or save % every != 0):
            yield (
                f"load_best_model_at_end=True needs an evaluation of every checkpoint: save_steps={save_steps!r} must "
                f"be a multiple of eval_steps={eval_steps!r}, both steps or both fractions."
            )

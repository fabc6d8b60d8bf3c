"""Completes checked arguments: names become enums, JSON text becomes mappings, unset values get their defaults."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from ds_trainer.arguments.accelerator_config import complete_accelerator_config
from ds_trainer.arguments.checks.type_checks import numbers_of_text
from ds_trainer.arguments.checks.value_checks import has_default_metric
from ds_trainer.arguments.compat.dict_fields import mapping_of_text, read_dict_fields
from ds_trainer.arguments.compat.renamed_arguments import OLDER_NAMES
from ds_trainer.arguments.enums import CHOICES, DebugOption, IntervalStrategy, LogLevel
from ds_trainer.arguments.parallelism_config import PARALLEL_SIZES, parallel_sizes
from ds_trainer.arguments.redefined import is_redefined
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import parse_tokens

# Fields that take a mapping, or its JSON text on a command line. Any other text is the path of a file.
JSON_FIELDS = (
    "lr_scheduler_kwargs",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "model_init_kwargs",
)
# The fields whose values become members of their enum. The other closed lists stay strings, as in the reference.
_AS_ENUM = (
    "lr_scheduler_type",
    "optim",
    "torch_autocast",
    "communication_data_type",
    "grad_accum_dtype",
    "offload_optimizer",
    "offload_param",
    "logging_strategy",
    "eval_strategy",
    "save_strategy",
    "hub_strategy",
    "generation_gather",
)

LONG_CONTEXT_TOKENS = 2**17
"""``max_length`` from which ``long_context`` is on by default."""


def fill_in(args: Any) -> None:
    """Complete ``args``, whose values have been checked. A second call changes nothing."""
    _paths_and_mappings(args)
    read_dict_fields(args)
    complete_accelerator_config(args)
    for name in _AS_ENUM:
        setattr(args, name, CHOICES[name](str(getattr(args, name))))
    if not isinstance(args.debug, list):
        args.debug = [DebugOption(option) for option in (args.debug or "").split()]
    args.include_num_input_tokens_seen = _token_count(args.include_num_input_tokens_seen)
    args.report_to = _as_list(args.report_to)
    for name in ("label_names", "include_for_metrics"):
        if isinstance(getattr(args, name), str):
            setattr(args, name, [getattr(args, name)])
    allowed = args.allow_new_weights
    args.allow_new_weights = ["*"] * allowed if isinstance(allowed, bool) else _as_list(allowed)
    _defaults_from_others(args)


def _paths_and_mappings(args: Any) -> None:
    if args.output_dir is None:
        args.output_dir = "trainer_output"
    args.output_dir = os.path.expanduser(os.fspath(args.output_dir))
    for name in JSON_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            setattr(args, name, mapping_of_text(value))
    vars(args).update(numbers_of_text(args))
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        if value is not None and 1 <= value < math.inf:
            setattr(args, name, int(value))
    sizes = parallel_sizes(args.parallelism_config)
    for field, key in PARALLEL_SIZES.items():
        if sizes.get(key) is not None:
            setattr(args, field, sizes[key])


def _defaults_from_others(args: Any) -> None:
    for old, new in OLDER_NAMES:
        if getattr(args, new) is None:
            setattr(args, new, getattr(args, old))
        setattr(args, old, getattr(args, new))
    length = None if is_redefined(args, "max_length") else args.max_length
    if isinstance(length, str):
        args.max_length = length = parse_tokens(length)
    if args.long_context is None:
        args.long_context = length is not None and length >= LONG_CONTEXT_TOKENS
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing = args.long_context
    if args.tiled_mlp is None:
        args.tiled_mlp = args.long_context
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if has_default_metric(args) and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.disable_tqdm is None:
        quiet = args.log_level in (LogLevel.ERROR, LogLevel.CRITICAL)
        args.disable_tqdm = quiet or get_logger("ds_trainer").getEffectiveLevel() > logging.WARNING
    if args.use_cpu:
        args.dataloader_pin_memory = False
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None or args.torch_compile_regional:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"


def _token_count(value: str | bool) -> str:
    return ("all" if value else "no") if isinstance(value, bool) else str(value)


def _as_list(value: Any) -> list[str]:
    if value is None or value == "none" or value == ["none"]:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def evaluation_metric(name: str) -> str:
    """The key of metric ``name`` in an evaluation's results. ``metric_for_best_model`` may leave out ``eval_``."""
    return name if name.startswith("eval_") else f"eval_{name}"


def as_mapping(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The value of a completed field of :data:`JSON_FIELDS`, whose JSON text has become a mapping."""
    assert not isinstance(value, str)
    return value

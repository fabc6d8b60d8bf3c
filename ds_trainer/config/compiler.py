"""The compiler: arguments + layout + model shape + the user's DeepSpeed file -> one DeepSpeed JSON.

The result is complete: every value has an origin, contradictions are refused, ``"auto"`` is filled in. Compiling is
arithmetic on plain data, without torch, deepspeed or a process group, so that ``ds-trainer config`` is fast and the
same arguments compile to the same JSON under every launcher.

Sources: https://www.deepspeed.ai/docs/config-json/ and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ds_trainer.arguments.accelerator_config import replica_batch_size, split_problems
from ds_trainer.arguments.construction import FILE_CHECKS
from ds_trainer.arguments.enums import AutocastDtype, OffloadDevice
from ds_trainer.arguments.parallelism_config import PARALLEL_SIZES, parallel_sizes
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.communication import write_communication_sizes, write_gradient_dtypes
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.config_builder import ConfigBuilder, flatten
from ds_trainer.config.environment import Environment
from ds_trainer.config.library_optimizer_table import LibraryOptimizer, library_optimizer
from ds_trainer.config.optimizer_block import write_optimizer
from ds_trainer.config.rules import Rule, RuleContext, broken_rules
from ds_trainer.config.schema import load_schema
from ds_trainer.config.schema_values import AUTO
from ds_trainer.config.user_config import read_user_config
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.layouts import layout_problems
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.offload_sizes import PARAM_BUFFERS, param_buffer
from ds_trainer.utils.errors import ConfigError, Problems
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

logger = get_logger(__name__)
_TORCH_DTYPES = {AutocastDtype.BF16: "torch.bfloat16", AutocastDtype.FP16: "torch.float16"}
_FP16_DEFAULTS = (
    ("loss_scale", 0, "0: dynamic loss scale"),
    ("initial_scale_power", 16, "the first scale is 2**16"),
    ("loss_scale_window", 1000, "steps without overflow before the scale doubles"),
    ("hysteresis", 2, "overflows before the scale halves"),
    ("min_loss_scale", 1, "the scale never falls below"),
)


def problems_of_file(source: Any) -> list[str]:
    """What is wrong with a DeepSpeed file, whatever the arguments are. It may be a part of a recipe."""
    if isinstance(source, Located) and not isinstance(source.value, dict):
        source = source.value
    if not isinstance(source, str | os.PathLike | Mapping | Located):
        return []  # which the check of the argument's type says
    try:
        root, problems = (source, []) if isinstance(source, Located) else read_user_config(source)
    except ConfigError as error:
        return error.problems
    return [*problems, *load_schema().problems(root)]


FILE_CHECKS["deepspeed"] = problems_of_file


def compile_config(
    args: TrainingArguments,
    layout: ParallelLayout,
    shape: ModelShape | None = None,
    device: str = "cpu",
    client_optimizer: str | None = None,
    environment: Environment | None = None,
    total_steps: int | None = None,
    problems: Problems | None = None,
    cluster: Cluster | None = None,
) -> CompiledConfig:
    """Compile the DeepSpeed configuration.

    Args:
        args: the arguments. ``args.deepspeed`` is the user's DeepSpeed file, its text, or a mapping.
        layout: the parallel layout of the ranks.
        shape: the model's shape, as far as it is known. It determines bucket sizes.
        device: type of device that runs the job, ``"cpu"`` or ``"cuda"``.
        client_optimizer: source of the optimizer if the arguments do not define it (an object passed to the Trainer, a
            subclass). The configuration then has no ``optimizer`` block.
        environment: software and disks of the machine that runs the job; None for another machine, which is not
            checked.
        total_steps: optimizer steps of the run, if known. A DeepSpeed ``scheduler`` may need them.
        problems: collects what is wrong instead of raising it.
        cluster: the machines, whose network determines sizes of messages; None if they are not known.

    Returns:
        A complete configuration: no ``"auto"``, every value with its origin. Compiling it again (as
        ``args.deepspeed``) gives the same values. If ``problems`` collects anything, the configuration may be
        incomplete and must not be used.

    Raises:
        ConfigError: with all problems at once, each with values, sources and remedy, if there is no collector.
    """
    collected = Problems(args.problems())
    wrong_arguments = bool(collected)
    user = user_settings(args, collected)
    schema = load_schema()
    findings = schema.findings(user) if user is not None else []
    collected.extend(finding.sentence for finding in findings if finding.refused)
    config, shape = CompiledConfig(), shape or ModelShape()
    if not wrong_arguments:
        sizes = [f"{name}={size} ({args.where(name)})" for name in PARALLEL_SIZES if (size := getattr(args, name)) > 1]
        collected.extend(layout_problems(shape, layout, " and ".join(sizes)))
    if user is not None and not wrong_arguments:
        # Wrong values of the file are left out, so that everything else can be checked too.
        wrong = [finding for finding in findings if finding.refused]
        leaves = flatten(user, schema, without={finding.path for finding in wrong})
        uncertain = {schema.canonical(finding.meant or finding.path) for finding in wrong}

        def compiled(problems: Problems, file_wins: bool) -> tuple[ConfigBuilder, list[Rule], RuleContext]:
            builder = ConfigBuilder(args, leaves, schema, problems, file_wins)
            builder.uncertain |= uncertain
            library = library_optimizer(args) if client_optimizer is None else None
            _layout(builder, args, layout)
            _batch(builder, args, layout)
            _precision(builder, args)
            _zero(builder, args, layout, shape, library, cluster)
            write_optimizer(builder, args, device, client_optimizer)
            write_gradient_dtypes(builder, args, layout)
            _scheduler(builder, args, total_steps)
            _engine(builder, args)
            builder.take_the_rest()
            context = RuleContext(builder.config, args, layout, device, environment, client_optimizer)
            return builder, broken_rules(context, builder.uncertain), context

        builder, broken, context = compiled(collected, file_wins=False)
        if builder.conflicts:  # only what is wrong whichever of two values the user keeps
            other = compiled(Problems(), file_wins=True)[1]
            broken = [rule for rule in broken if rule in other]
        collected.extend(rule.sentence(context) for rule in broken if rule.refuses)
        config = builder.config
        unread = [finding.sentence for finding in findings if not finding.refused]
        unused = [rule.sentence(context) for rule in broken if not rule.refuses]
        if problems is None and not collected and (unread or unused):
            logger.warning(
                "The DeepSpeed configuration has settings without effect. %s",
                " ".join([*([schema.without_effect(unread)] if unread else []), *unused]),
            )
    if problems is None:
        collected.raise_if_any()
    else:
        problems.extend(collected)
    return config


def user_settings(args: TrainingArguments, problems: Problems) -> Located | None:
    """The settings of the user's file, empty without a file; None if it cannot be read."""
    if args.deepspeed is None:
        return Located({}, "deepspeed")
    try:
        root, of_file = read_user_config(args.deepspeed)
    except ConfigError as error:
        source = args.where("deepspeed")
        problems.extend(p if source == "argument" else f"{source}: {p}" for p in error.problems)
        return None
    problems.extend(of_file)
    return _with_sources(root, "deepspeed", args.origins)


def _with_sources(entry: Located, path: str, origins: dict[str, str]) -> Located:
    """``entry`` with the sources of a recipe that contains the DeepSpeed configuration."""
    value = entry.value
    if isinstance(value, dict):
        value = {key: _with_sources(below, f"{path}.{key}", origins) for key, below in value.items()}
    return Located(value, entry.where if path == "deepspeed" else origins.get(path, entry.where))


# -- layout and batch ------------------------------------------------------------------------------------------------


def _layout(builder: ConfigBuilder, args: TrainingArguments, layout: ParallelLayout) -> None:
    if layout.tp == 1 and builder.requested("tensor_parallel.autotp_size") in (None, 0, 1):
        builder.drop("tensor_parallel.autotp_size")  # 0 and no key both mean none to DeepSpeed
    if layout.tp > 1 or builder.requested("tensor_parallel.autotp_size") is not None:
        builder.argument("tensor_parallel.autotp_size", layout.tp, "tensor_parallel_size")
    for path, name in (
        ("tensor_parallel.tp.tp_size", "tensor_parallel_size"),
        ("tensor_parallel.tensor_parallel.tp_size", "tensor_parallel_size"),
        ("sequence_parallel_size", "sequence_parallel_size"),
    ):
        entry, size = builder.drop(path), getattr(args, name)
        if entry is not None and entry.value not in (AUTO, size):
            builder.conflict(path, entry, f"{name}={size} ({args.where(name)})", name)
    sizes = parallel_sizes(args.parallelism_config)
    replicas = (sizes.get("dp_replicate_size") or 1) * (sizes.get("dp_shard_size") or 1)
    if replicas not in (1, layout.dp):  # 1 is accelerate's default
        builder.problems.add(
            f"parallelism_config requests dp_replicate_size x dp_shard_size = {replicas} replicas, but "
            f"{layout.describe()}: dp is {layout.dp}. Leave both out, or change the number of ranks."
        )


def _batch(builder: ConfigBuilder, args: TrainingArguments, layout: ParallelLayout) -> None:
    micro_batch = args.per_device_train_batch_size
    builder.problems.extend(split_problems(args, layout.dp))
    with builder.problems.collecting():
        micro_batch = replica_batch_size(args, "per_device_train_batch_size", layout.dp)
    builder.argument("train_micro_batch_size_per_gpu", micro_batch, "per_device_train_batch_size")
    builder.argument("gradient_accumulation_steps", args.gradient_accumulation_steps, "gradient_accumulation_steps")
    # Always written: without the key, DeepSpeed clips to 1.0.
    builder.argument("gradient_clipping", float(args.max_grad_norm), "max_grad_norm")
    # Checked here and left out: DeepSpeed would compare it with the whole world size, ignoring tp, cp and sp.
    entry = builder.drop("train_batch_size")
    plan = BatchPlan(layout, micro_batch, args.gradient_accumulation_steps)
    if entry is not None and entry.value not in (AUTO, plan.global_batch_size):
        divisors = "".join(
            f" / {name} {size}"
            for name, size in (("tensor", layout.tp), ("context", layout.cp), ("sequence", layout.sp))
            if size > 1
        )
        ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
        builder.problems.add(
            f"train_batch_size={entry.plain()} in {entry.where}, but {micro_batch} "
            f"(per_device_train_batch_size) x {args.gradient_accumulation_steps} (gradient_accumulation_steps) x "
            f"{layout.dp} (data parallel: {ranks}{divisors}) = {plan.global_batch_size}. Write "
            f'{plan.global_batch_size} or "auto" there, or leave it out; or change one of the factors.'
        )
    if builder.mentions("dataloader_drop_last"):
        builder.argument("dataloader_drop_last", args.dataloader_drop_last, "dataloader_drop_last")


# -- precision -------------------------------------------------------------------------------------------------------


def _precision(builder: ConfigBuilder, args: TrainingArguments) -> None:
    for name in ("bf16", "fp16"):
        builder.argument(f"{name}.enabled", getattr(args, name), name)
    if args.fp16:
        for key, value, why in _FP16_DEFAULTS:
            builder.default(f"fp16.{key}", value, why)
    if args.torch_autocast != AutocastDtype.NONE:
        builder.argument("torch_autocast.enabled", True, "torch_autocast")
        entry = builder.drop("torch_autocast.dtype")
        dtype = _TORCH_DTYPES[AutocastDtype(args.torch_autocast)]
        same = (AUTO, dtype, dtype.removeprefix("torch."), str(args.torch_autocast))
        if entry is not None and entry.value not in same:
            shown = f"torch_autocast={args.torch_autocast} ({args.where('torch_autocast')})"
            builder.conflict("torch_autocast.dtype", entry, shown, "torch_autocast")
        builder.argument("torch_autocast.dtype", dtype, "torch_autocast")
    elif args.given("torch_autocast") and builder.mentions("torch_autocast.enabled"):
        builder.argument("torch_autocast.enabled", False, "torch_autocast")
    elif builder.requested("torch_autocast.enabled") is True:
        builder.derive("torch_autocast.dtype", _TORCH_DTYPES[AutocastDtype.BF16], "torch's default on GPUs is fp16")


# -- ZeRO ------------------------------------------------------------------------------------------------------------


def _zero(
    builder: ConfigBuilder,
    args: TrainingArguments,
    layout: ParallelLayout,
    shape: ModelShape,
    library: LibraryOptimizer | None,
    cluster: Cluster | None,
) -> None:
    for name in ("offload_optimizer", "offload_param"):
        _offload(builder, args, name)
    devices = (builder.config.offload("optimizer"), builder.config.offload("param"))
    if args.nvme_path is not None and "nvme" not in devices:
        builder.problems.add(
            f"nvme_path={args.nvme_path} ({args.where('nvme_path')}), but nothing is offloaded to NVMe. Set "
            "offload_optimizer=nvme or offload_param=nvme, or leave nvme_path out."
        )
    path = "zero_optimization.stage"
    if args.zero_stage is not None:
        builder.argument(path, args.zero_stage, "zero_stage")
    else:
        builder.derive(
            path, *_lowest_stage(builder.config, layout, args.optim if library and library.stage_0_only else "")
        )
    stage = builder.config.get(path)
    if devices[1] == "nvme":
        _weights_on_nvme(builder, shape, layout)
    if stage > 0:
        write_communication_sizes(builder, stage, layout, shape, cluster)


def _weights_on_nvme(builder: ConfigBuilder, shape: ModelShape, layout: ParallelLayout) -> None:
    """Buffers of the shards that are read from NVMe, and no prefetch.

    A gathered weight keeps its buffer until it is released, and DeepSpeed asserts that one is free and that it holds
    the shard. Its prefetch may read a weight twice, which ends in ``already assigned swap buffer id``.
    """
    path = "zero_optimization.stage3_prefetch_bucket_size"
    if builder.requested(path):
        builder.problems.add(
            f"{path}={builder.requested(path)} in {builder.where(path)}, but weights are on NVMe "
            f"({builder.config.describe('zero_optimization.offload_param.device')}): DeepSpeed's prefetch reads a "
            "weight twice there and stops. Set it to 0, or leave it out."
        )
    builder.derive(path, 0, "weights on NVMe: DeepSpeed's prefetch reads a weight twice there, and stops")
    why = "weights on NVMe are released after each use, because a gathered one keeps its buffer"
    builder.derive("zero_optimization.stage3_max_reuse_distance", 0, why)
    section = "zero_optimization.offload_param"
    builder.derive(f"{section}.buffer_count", PARAM_BUFFERS, "weights that are gathered at a time, with a margin")
    if shape.transformer is not None:
        ranks = layout.seq_data_parallel_size
        size = param_buffer(shape.transformer.largest_matrix, ranks)
        builder.derive(
            f"{section}.buffer_size", size, f"the largest matrix on {counted(ranks, 'rank')} ({shape.source})"
        )


def _lowest_stage(config: CompiledConfig, layout: ParallelLayout, stage_0_optimizer: str) -> tuple[int, str]:
    for state, stage in (("param", 3), ("optimizer", 1)):
        device = config.offload(state)
        if device is not None:
            offload = config.describe(f"zero_optimization.offload_{state}.device")
            return 3 if device == "nvme" else stage, f"the lowest stage that supports {offload}"
    if stage_0_optimizer:
        return 0, f"optim={stage_0_optimizer} needs weights that ZeRO does not shard"
    dtype = config.precision.dtype
    if layout.tp > 1 and dtype != "fp32":
        return 1, "16 bits with tensor parallelism: stage 0 leaves partitions out of the gradient norm"
    if dtype == "fp16":
        return 1, "fp16: without ZeRO DeepSpeed does not scale the loss"
    if layout.seq_data_parallel_size == 1:
        return 0, "one data-parallel rank, nothing to shard"
    return 1, f"{layout.seq_data_parallel_size} data-parallel ranks: the same results as stage 0 in less memory"


def _offload(builder: ConfigBuilder, args: TrainingArguments, name: str) -> None:
    section = f"zero_optimization.{name}"
    device = getattr(args, name)
    if device != OffloadDevice.NONE or (args.given(name) and builder.mentions(f"{section}.device")):
        builder.argument(f"{section}.device", str(device), name)
    elif builder.mentions(f"{section}.device"):
        builder.derive(f"{section}.device", "none", "not requested")
    device = builder.config.get(f"{section}.device", "none")
    if device == "none":
        return
    if device == "nvme" and (args.nvme_path is not None):
        builder.argument(f"{section}.nvme_path", args.nvme_path, "nvme_path")
    pin = args.dataloader_pin_memory and not args.use_cpu
    why = "page-locked for faster copies" if pin else "dataloader_pin_memory=False or use_cpu=True"
    builder.derive(f"{section}.pin_memory", pin, why)


# -- schedule and engine ---------------------------------------------------------------------------------------------


def _scheduler(builder: ConfigBuilder, args: TrainingArguments, total_steps: int | None) -> None:
    """Complete DeepSpeed's schedule, if the file has one. ``lr_scheduler_type`` is not written into the file."""
    scheduler = builder.requested("scheduler.type")
    if scheduler is None:
        if builder.mentions("scheduler"):
            builder.problems.add(
                f"{builder.first_source('scheduler')}: scheduler has no type. Name one of DeepSpeed's, or leave "
                "scheduler out and set lr_scheduler_type."
            )
        return
    if args.given("lr_scheduler_type"):
        builder.problems.add(
            f"scheduler.type={json.dumps(scheduler)} in {builder.where('scheduler.type')}, but "
            f"lr_scheduler_type={args.lr_scheduler_type} ({args.where('lr_scheduler_type')}). Keep one of them."
        )
    steps = total_steps if total_steps is not None else (args.max_steps if args.max_steps > 0 else None)
    params = "scheduler.params"
    if builder.mentions(f"{params}.warmup_min_lr"):
        builder.default(f"{params}.warmup_min_lr", 0, "warmup starts at 0")
    if builder.mentions(f"{params}.warmup_max_lr"):
        builder.argument(f"{params}.warmup_max_lr", args.learning_rate, "learning_rate")
    for key in ("total_num_steps", "warmup_num_steps"):
        path = f"{params}.{key}"
        needs_steps = key == "total_num_steps" or 0 < args.warmup_steps < 1
        if not builder.mentions(path) or path in builder.uncertain:
            continue
        if builder.requested(path) is None and needs_steps and steps is None:
            builder.problems.add(
                f'{path}="auto" in {builder.where(path)} needs the number of optimizer steps, which follows from the '
                "data. Set max_steps, or write a number."
            )
            builder.drop(path)
        elif key == "total_num_steps" and steps is not None:
            builder.determined(path, steps, "max_steps", f"the run has {steps} optimizer steps")
        elif key == "warmup_num_steps" and not (needs_steps and steps is None):
            warmup = max(1, args.get_warmup_steps(steps or 0))  # DeepSpeed divides by it
            if args.given("warmup_steps"):
                shown = f"warmup_steps={args.warmup_steps} ({args.where('warmup_steps')}), at least 1"
                builder.determined(path, warmup, "warmup_steps", shown)
            else:
                builder.derive(path, warmup, f"warmup_steps={args.warmup_steps}, at least 1")


def _engine(builder: ConfigBuilder, args: TrainingArguments) -> None:
    # DeepSpeed's throughput timer synchronizes the device twice per step. The Trainer measures throughput itself.
    builder.default("timers.throughput.enabled", False, "no device synchronization in a step")
    builder.default("wall_clock_breakdown", False, "no timers in a step")

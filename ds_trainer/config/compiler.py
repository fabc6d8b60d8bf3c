"""The compiler: arguments + layout + model shape + the user's own DeepSpeed file -> one DeepSpeed JSON.

Nothing guessed, nothing left open: every value has an origin, what contradicts is refused, ``"auto"`` is filled. Pure
arithmetic on plain data: no torch, no deepspeed, no process group, so that ``ds-trainer config`` answers at once and
the same arguments compile to the same JSON under every launcher.

Sources: https://www.deepspeed.ai/docs/config-json/ and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json

from ds_trainer.arguments.checks import PARALLEL_SIZES, parallel_sizes
from ds_trainer.arguments.enums import AutocastDtype, OffloadDevice
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.draft import Draft, flatten
from ds_trainer.config.environment import Environment
from ds_trainer.config.gradient_dtypes import write_gradient_dtypes
from ds_trainer.config.library_optimizers import LibraryOptimizer, library_optimizer
from ds_trainer.config.optimizer_block import write_optimizer
from ds_trainer.config.rules import Case, broken_rules
from ds_trainer.config.schema import load_schema
from ds_trainer.config.schema_values import AUTO
from ds_trainer.config.user_config import read_user_config
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.layouts import layout_problems
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils.errors import ConfigError

# A bucket below a million elements costs more in start-up of collectives than it saves in overlap.
_SMALLEST_BUCKET = 2**20
_TORCH_DTYPES = {AutocastDtype.BF16: "torch.bfloat16", AutocastDtype.FP16: "torch.float16"}
_FP16_DEFAULTS = (
    ("loss_scale", 0, "0: dynamic loss scale"),
    ("initial_scale_power", 16, "the first scale is 2**16"),
    ("loss_scale_window", 1000, "steps without overflow before the scale doubles"),
    ("hysteresis", 2, "overflows before the scale halves"),
    ("min_loss_scale", 1, "the scale never falls below"),
)


def compile_config(
    args: TrainingArguments,
    layout: ParallelLayout,
    shape: ModelShape | None = None,
    device: str = "cpu",
    client_optimizer: str | None = None,
    environment: Environment | None = None,
    total_steps: int | None = None,
) -> CompiledConfig:
    """Compile the DeepSpeed configuration.

    Args:
        args: what the user asks for; ``args.deepspeed`` is the user's own DeepSpeed file, text or mapping.
        layout: where every rank stands.
        shape: the model's shape, as far as known; decides bucket sizes.
        device: ``"cpu"`` or ``"cuda"``, the kind of device that will run it.
        client_optimizer: where the optimizer comes from when the arguments do not decide it (an object handed to the
            Trainer, a subclass); the configuration then has no ``optimizer`` block.
        environment: what the machine that will run it has; None when that is another machine, which is not judged.
        total_steps: optimizer steps of the run where they are known; a ``scheduler`` of DeepSpeed may ask for them.

    Returns:
        A complete configuration: no ``"auto"``, every value with its origin. Compiling it again (as
        ``args.deepspeed``) gives the same values.

    Raises:
        ConfigError: all reasons why this cannot run, at once, each with values, origins and remedy.
    """
    wrong = args.problems()
    if wrong:
        raise ConfigError(wrong)
    schema, library = load_schema(), library_optimizer(args)
    user, problems = _user_settings(args)
    findings = schema.findings(user)

    # What is wrong in the file is left out, so that all else can be looked at too.
    draft = Draft(args, flatten(user, schema, without={path for path, _ in findings}), schema)
    _layout(draft, args, layout)
    _batch(draft, args, layout)
    _precision(draft, args)
    _zero(draft, args, layout, shape or ModelShape(), library if client_optimizer is None else None)
    write_optimizer(draft, args, device, client_optimizer)
    write_gradient_dtypes(draft, args, layout)
    _scheduler(draft, args, total_steps)
    _engine(draft, args)
    draft.take_the_rest()
    problems += [sentence for _, sentence in findings] + draft.problems
    said = [f"{name}={value} ({args.where(name)})" for name in PARALLEL_SIZES if (value := getattr(args, name)) > 1]
    problems += layout_problems(shape or ModelShape(), layout, " and ".join(said))
    if problems:  # rules would blame values that are in doubt
        raise ConfigError(problems)
    broken = broken_rules(Case(draft.config, args, layout, device, environment, client_optimizer))
    if broken:
        raise ConfigError(broken)
    return draft.config


def _user_settings(args: TrainingArguments) -> tuple[Located, list[str]]:
    if args.deepspeed is None:
        return Located({}, "deepspeed"), []
    try:
        root, problems = read_user_config(args.deepspeed)
    except ConfigError as error:
        place = args.where("deepspeed")
        raise ConfigError([p if place == "argument" else f"{place}: {p}" for p in error.problems]) from None
    return _placed(root, "deepspeed", args.origins), problems


def _placed(entry: Located, path: str, origins: dict[str, str]) -> Located:
    """``entry`` with the places of a recipe that has the whole configuration in it."""
    value = entry.value
    if isinstance(value, dict):
        value = {key: _placed(below, f"{path}.{key}", origins) for key, below in value.items()}
    return Located(value, entry.where if path == "deepspeed" else origins.get(path, entry.where))


# -- layout and batch ------------------------------------------------------------------------------------------------


def _layout(draft: Draft, args: TrainingArguments, layout: ParallelLayout) -> None:
    if layout.tp == 1 and draft.asked("tensor_parallel.autotp_size") in (None, 0, 1):
        draft.drop("tensor_parallel.autotp_size")  # DeepSpeed says none by 0, or by silence
    if layout.tp > 1 or draft.asked("tensor_parallel.autotp_size") is not None:
        draft.argument("tensor_parallel.autotp_size", layout.tp, "tensor_parallel_size")
    for path, name in (
        ("tensor_parallel.tp.tp_size", "tensor_parallel_size"),
        ("tensor_parallel.tensor_parallel.tp_size", "tensor_parallel_size"),
        ("sequence_parallel_size", "sequence_parallel_size"),
    ):
        entry, own = draft.drop(path), getattr(args, name)
        if entry is not None and entry.value not in (AUTO, own):
            draft.conflict(path, entry, f"{name}={own} ({args.where(name)})", name)
    sizes = parallel_sizes(args.parallelism_config)
    replicas = (sizes.get("dp_replicate_size") or 1) * (sizes.get("dp_shard_size") or 1)
    if replicas not in (1, layout.dp):  # 1 is accelerate's way of saying nothing
        draft.problems.append(
            f"parallelism_config asks for dp_replicate_size x dp_shard_size = {replicas} replicas, but "
            f"{layout.describe()}: dp is {layout.dp}. Leave both out, or start another number of ranks."
        )


def _batch(draft: Draft, args: TrainingArguments, layout: ParallelLayout) -> None:
    draft.argument("train_micro_batch_size_per_gpu", args.per_device_train_batch_size, "per_device_train_batch_size")
    draft.argument("gradient_accumulation_steps", args.gradient_accumulation_steps, "gradient_accumulation_steps")
    # DeepSpeed clips to 1.0 when the key is absent, so it is always written.
    draft.argument("gradient_clipping", float(args.max_grad_norm), "max_grad_norm")
    # Checked here and left out on purpose: DeepSpeed would check it against the whole world, ignoring tp, cp and sp.
    entry = draft.drop("train_batch_size")
    plan = BatchPlan(layout, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if entry is not None and entry.value not in (AUTO, plan.step_size):
        shared = "".join(
            f" / {word} {size}"
            for word, size in (("tensor", layout.tp), ("context", layout.cp), ("sequence", layout.sp))
            if size > 1
        )
        ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
        draft.problems.append(
            f"train_batch_size={entry.plain()} in {entry.where}, but {args.per_device_train_batch_size} "
            f"(per_device_train_batch_size) x {args.gradient_accumulation_steps} (gradient_accumulation_steps) x "
            f"{layout.dp} (data parallel: {ranks}{shared}) = {plan.step_size}. Write "
            f'{plan.step_size} or "auto" there, or leave it out; or change one of the factors.'
        )
    if draft.mentions("dataloader_drop_last"):
        draft.argument("dataloader_drop_last", args.dataloader_drop_last, "dataloader_drop_last")


# -- precision -------------------------------------------------------------------------------------------------------


def _precision(draft: Draft, args: TrainingArguments) -> None:
    for name in ("bf16", "fp16"):
        draft.argument(f"{name}.enabled", getattr(args, name), name)
    if args.fp16:
        for key, value, why in _FP16_DEFAULTS:
            draft.default(f"fp16.{key}", value, why)
    if args.torch_autocast != AutocastDtype.NONE:
        draft.argument("torch_autocast.enabled", True, "torch_autocast")
        entry = draft.drop("torch_autocast.dtype")
        dtype = _TORCH_DTYPES[AutocastDtype(args.torch_autocast)]
        same = (AUTO, dtype, dtype.removeprefix("torch."), str(args.torch_autocast))
        if entry is not None and entry.value not in same:
            said = f"torch_autocast={args.torch_autocast} ({args.where('torch_autocast')})"
            draft.conflict("torch_autocast.dtype", entry, said, "torch_autocast")
        draft.argument("torch_autocast.dtype", dtype, "torch_autocast")
    elif args.given("torch_autocast") and draft.mentions("torch_autocast.enabled"):
        draft.argument("torch_autocast.enabled", False, "torch_autocast")
    elif draft.asked("torch_autocast.enabled") is True:
        draft.derive("torch_autocast.dtype", _TORCH_DTYPES[AutocastDtype.BF16], "without one, torch's is fp16 on GPUs")


# -- ZeRO ------------------------------------------------------------------------------------------------------------


def _zero(
    draft: Draft, args: TrainingArguments, layout: ParallelLayout, shape: ModelShape, library: LibraryOptimizer | None
) -> None:
    for what in ("offload_optimizer", "offload_param"):
        _offload(draft, args, what)
    devices = [draft.config.get(f"zero_optimization.{what}.device") for what in ("offload_optimizer", "offload_param")]
    if args.nvme_path is not None and "nvme" not in devices:
        draft.problems.append(
            f"nvme_path={args.nvme_path} ({args.where('nvme_path')}), but nothing is offloaded to NVMe. Set "
            "offload_optimizer=nvme or offload_param=nvme, or leave it out."
        )
    path = "zero_optimization.stage"
    if args.zero_stage is not None:
        draft.argument(path, args.zero_stage, "zero_stage")
    else:
        draft.derive(path, *_lowest_stage(draft.config, layout, args.optim if library and library.stage_0_only else ""))
    stage = draft.config.get(path)
    if stage == 0 or shape.hidden_size is None:
        return  # with an unknown width: DeepSpeed's own sizes
    width = shape.hidden_size
    bucket = max(width * width, _SMALLEST_BUCKET)
    bucket += bucket % 2  # DeepSpeed asks for an even number
    reason = f"{shape.source}, at least {_SMALLEST_BUCKET} elements"
    draft.derive("zero_optimization.reduce_bucket_size", bucket, f"hidden size squared, {reason}")
    if stage < 3:
        draft.derive("zero_optimization.allgather_bucket_size", bucket, f"hidden size squared, {reason}")
    else:
        prefetch = bucket * 9 // 10
        draft.derive("zero_optimization.stage3_prefetch_bucket_size", prefetch, f"0.9 x bucket, {reason}")
        why = f"10 x hidden size ({shape.source}): vectors stay whole, matrices are sharded"
        draft.derive("zero_optimization.stage3_param_persistence_threshold", 10 * width, why)


def _lowest_stage(config: CompiledConfig, layout: ParallelLayout, whole: str) -> tuple[int, str]:
    for what, stage in (("offload_param", 3), ("offload_optimizer", 1)):
        device = config.get(f"zero_optimization.{what}.device", "none")
        if device == "nvme":
            stage = 3
        if device != "none":
            said = config.said(f"zero_optimization.{what}.device")
            return stage, f"the lowest stage that can do {said}"
    if whole:
        return 0, f"optim={whole} needs weights that ZeRO has not cut"
    if layout.tp > 1 and (config.get("bf16.enabled") or config.get("fp16.enabled")):
        return 1, "16 bits with tensor parallelism: stage 0 leaves slices out of the gradient norm"
    if config.get("fp16.enabled"):
        return 1, "fp16: without ZeRO DeepSpeed does not scale the loss"
    if layout.gradient_ranks == 1:
        return 0, "one gradient rank, nothing to shard"
    return 1, f"{layout.gradient_ranks} gradient ranks: the same numbers as stage 0 in less memory"


def _offload(draft: Draft, args: TrainingArguments, what: str) -> None:
    section = f"zero_optimization.{what}"
    device = getattr(args, what)
    if device != OffloadDevice.NONE or (args.given(what) and draft.mentions(f"{section}.device")):
        draft.argument(f"{section}.device", str(device), what)
    elif draft.mentions(f"{section}.device"):
        draft.derive(f"{section}.device", "none", "not asked for")
    device = draft.config.get(f"{section}.device", "none")
    if device == "none":
        return
    if device == "nvme" and (args.nvme_path is not None):
        draft.argument(f"{section}.nvme_path", args.nvme_path, "nvme_path")
    pin = args.dataloader_pin_memory and not args.use_cpu
    why = "page-locked for faster copies" if pin else "dataloader_pin_memory=False or use_cpu=True"
    draft.derive(f"{section}.pin_memory", pin, why)


# -- schedule and engine ---------------------------------------------------------------------------------------------


def _scheduler(draft: Draft, args: TrainingArguments, total_steps: int | None) -> None:
    """DeepSpeed's own schedule, where the file has one; ours is not written into the configuration."""
    kind = draft.asked("scheduler.type")
    if kind is None:
        if draft.mentions("scheduler"):
            draft.problems.append(
                f"{draft.first_place('scheduler')}: scheduler has no type. Name one of DeepSpeed's, or leave scheduler "
                "out and set lr_scheduler_type."
            )
        return
    if args.given("lr_scheduler_type"):
        draft.problems.append(
            f"scheduler.type={json.dumps(kind)} in {draft.where('scheduler.type')}, but "
            f"lr_scheduler_type={args.lr_scheduler_type} ({args.where('lr_scheduler_type')}). Keep one of them."
        )
    steps = total_steps if total_steps is not None else (args.max_steps if args.max_steps > 0 else None)
    params = "scheduler.params"
    if draft.mentions(f"{params}.warmup_min_lr"):
        draft.default(f"{params}.warmup_min_lr", 0, "warm-up begins at 0")
    if draft.mentions(f"{params}.warmup_max_lr"):
        draft.argument(f"{params}.warmup_max_lr", args.learning_rate, "learning_rate")
    for key in ("total_num_steps", "warmup_num_steps"):
        path = f"{params}.{key}"
        needs_steps = key == "total_num_steps" or 0 < args.warmup_steps < 1
        if not draft.mentions(path):
            continue
        if draft.asked(path) is None and needs_steps and steps is None:
            draft.problems.append(
                f'{path}="auto" in {draft.where(path)} needs the number of optimizer steps, which follows from the '
                "data. Set max_steps, or write a number."
            )
            draft.drop(path)
        elif key == "total_num_steps":
            draft.derive(path, steps, "optimizer steps of the run")
        else:  # DeepSpeed divides by it
            draft.derive(
                path, max(1, args.get_warmup_steps(steps or 0)), f"warmup_steps={args.warmup_steps}, at least 1"
            )


def _engine(draft: Draft, args: TrainingArguments) -> None:
    # DeepSpeed's throughput timer synchronises the device twice a step; the trainer has its own meter.
    draft.default("timers.throughput.enabled", False, "no device synchronisation on the hot path")
    draft.default("wall_clock_breakdown", False, "no timers on the hot path")

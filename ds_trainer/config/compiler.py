"""The compiler: ``TrainingArguments`` + layout + model shape -> one DeepSpeed JSON, nothing guessed, nothing left open.

Pure arithmetic on plain data: no torch, no deepspeed, no process group, so that ``ds-trainer config`` answers at once
and the same arguments compile to the same JSON under every launcher. What cannot work on the device is refused here,
before anything starts.

Sources: https://www.deepspeed.ai/docs/config-json/ and the pydantic models of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

from ds_trainer.arguments.enums import AutocastDtype, OffloadDevice, OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils.errors import ConfigError

# A bucket below a million elements costs more in start-up of collectives than it saves in overlap.
_SMALLEST_BUCKET = 2**20
_TORCH_DTYPES = {AutocastDtype.BF16: "torch.bfloat16", AutocastDtype.FP16: "torch.float16"}


def compile_config(
    args: TrainingArguments,
    layout: ParallelLayout,
    shape: ModelShape | None = None,
    device: str = "cpu",
    client_optimizer: str | None = None,
) -> CompiledConfig:
    """Compile the DeepSpeed configuration.

    Args:
        args: what the user asks for.
        layout: where every rank stands.
        shape: the model's shape, as far as known; decides bucket sizes.
        device: ``"cpu"`` or ``"cuda"``, the kind of device that will run it.
        client_optimizer: where the optimizer comes from when the arguments do not decide it (an object handed to the
            Trainer, a subclass); the configuration then has no ``optimizer`` block.

    Returns:
        A complete configuration: no ``"auto"``, every value with its origin.

    Raises:
        ConfigError: all reasons why this cannot run on ``device``, at once.
    """
    stage, why_stage = zero_stage(args, layout)
    problems = _device_problems(args, stage, why_stage, device)
    if problems:
        raise ConfigError(problems)
    config = CompiledConfig()
    _batch(config, args)
    _precision(config, args)
    if client_optimizer is None:
        _optimizer(config, args, device)
    else:
        _client_optimizer(config, args, client_optimizer)
    _zero(config, args, layout, shape or ModelShape(), stage, why_stage)
    _engine(config)
    return config


def zero_stage(args: TrainingArguments, layout: ParallelLayout) -> tuple[int, str]:
    """The ZeRO stage and, in words, why."""
    if args.zero_stage is not None:
        return args.zero_stage, f"zero_stage={args.zero_stage}"
    if args.offload_optimizer == OffloadDevice.CPU:
        return 1, "the lowest stage that can offload the optimizer (offload_optimizer=cpu)"
    if layout.gradient_ranks == 1:
        return 0, "one gradient rank, nothing to shard"
    return 1, f"{layout.gradient_ranks} gradient ranks: the same numbers as stage 0 in less memory"


def _device_problems(args: TrainingArguments, stage: int, why_stage: str, device: str) -> list[str]:
    problems = []
    if device == "cpu":
        if args.fp16:
            problems.append("fp16=True needs a GPU: this run is on the CPU. Use bf16=True, or neither for float32.")
        if args.torch_autocast == AutocastDtype.FP16:
            problems.append("torch_autocast=fp16 needs a GPU: this run is on the CPU. Use torch_autocast=bf16.")
    if args.offload_optimizer == OffloadDevice.CPU and stage == 0:
        problems.append(f"offload_optimizer=cpu needs ZeRO stage 1, 2 or 3, but the stage is 0 ({why_stage}).")
    if args.offload_optimizer == OffloadDevice.CPU and device == "cuda" and args.optim == OptimizerNames.SGD:
        problems.append("optim=sgd has no CPU version in DeepSpeed: offload_optimizer=cpu needs optim=adamw_torch.")
    known = {"momentum", "dampening", "nesterov"} if args.optim == OptimizerNames.SGD else {"amsgrad"}
    problems += [
        f"optim_args: '{name}' is not an argument of {args.optim}; known are {', '.join(sorted(known))}."
        for name in args.optimizer_arguments()
        if name not in known
    ]
    return problems


def _batch(config: CompiledConfig, args: TrainingArguments) -> None:
    # train_batch_size is left out on purpose: DeepSpeed would check it against the whole world, ignoring tp, cp and sp.
    # The layout owns that product.
    config.set(
        "train_micro_batch_size_per_gpu",
        args.per_device_train_batch_size,
        "argument",
        "per_device_train_batch_size",
    )
    config.set(
        "gradient_accumulation_steps", args.gradient_accumulation_steps, "argument", "gradient_accumulation_steps"
    )
    # DeepSpeed clips to 1.0 when the key is absent, so it is always written.
    config.set("gradient_clipping", float(args.max_grad_norm), "argument", "max_grad_norm (0.0: no clipping)")


def _precision(config: CompiledConfig, args: TrainingArguments) -> None:
    config.set("bf16.enabled", args.bf16, "argument", "bf16")
    config.set("fp16.enabled", args.fp16, "argument", "fp16")
    if args.fp16:
        config.set("fp16.loss_scale", 0, "default", "0: dynamic loss scale")
        config.set("fp16.initial_scale_power", 16, "default", "the first scale is 2**16")
        config.set("fp16.loss_scale_window", 1000, "default", "steps without overflow before the scale doubles")
        config.set("fp16.hysteresis", 2, "default", "overflows before the scale halves")
        config.set("fp16.min_loss_scale", 1, "default", "the scale never falls below")
    if args.torch_autocast != AutocastDtype.NONE:
        config.set("torch_autocast.enabled", True, "argument", f"torch_autocast={args.torch_autocast}")
        dtype = _TORCH_DTYPES[AutocastDtype(args.torch_autocast)]
        config.set("torch_autocast.dtype", dtype, "argument", f"torch_autocast={args.torch_autocast}")


def _optimizer(config: CompiledConfig, args: TrainingArguments, device: str) -> None:
    def parameter(name: str, value: Any, kind: str, detail: str) -> None:
        config.set(f"optimizer.params.{name}", value, kind, detail)

    extra = args.optimizer_arguments()
    if args.optim == OptimizerNames.SGD:
        config.set("optimizer.type", "SGD", "argument", f"optim={args.optim}")
        parameter("lr", args.learning_rate, "argument", "learning_rate")
        parameter("weight_decay", args.weight_decay, "argument", "weight_decay")
    else:
        config.set("optimizer.type", "AdamW", "argument", f"optim={args.optim}")
        parameter("lr", args.learning_rate, "argument", "learning_rate")
        parameter("betas", [args.adam_beta1, args.adam_beta2], "argument", "adam_beta1, adam_beta2")
        parameter("eps", args.adam_epsilon, "argument", "adam_epsilon")
        parameter("weight_decay", args.weight_decay, "argument", "weight_decay")
        if args.offload_optimizer == OffloadDevice.CPU and device == "cuda":
            detail = "offload_optimizer=cpu on a GPU: DeepSpeed's vectorised CPUAdam (compiled at first use)"
            parameter("torch_adam", False, "derived", detail)
        else:
            parameter("torch_adam", True, "derived", "torch.optim.AdamW needs no compiler")
            parameter("fused", args.optim == OptimizerNames.ADAMW_TORCH_FUSED, "argument", f"optim={args.optim}")
    for name, value in extra.items():
        parameter(name, value, "argument", f"optim_args={args.optim_args}")
    # SGD is not on DeepSpeed's list of ZeRO-tested optimizers; our oracle tests cover it on every stage.
    allow = args.optim == OptimizerNames.SGD
    config.set("zero_allow_untested_optimizer", allow, "derived", f"optim={args.optim}")
    if args.offload_optimizer == OffloadDevice.CPU and device == "cpu":
        detail = "on a CPU machine torch's optimizer is as good as DeepSpeed's and needs no compiler"
        config.set("zero_force_ds_cpu_optimizer", False, "derived", detail)


def _client_optimizer(config: CompiledConfig, args: TrainingArguments, source: str) -> None:
    config.set("zero_allow_untested_optimizer", True, "derived", source)
    if args.offload_optimizer == OffloadDevice.CPU:
        config.set("zero_force_ds_cpu_optimizer", False, "derived", source)


def _zero(
    config: CompiledConfig, args: TrainingArguments, layout: ParallelLayout, shape: ModelShape, stage: int, why: str
) -> None:
    kind = "argument" if args.zero_stage is not None else "derived"
    config.set("zero_optimization.stage", stage, kind, why)
    if stage == 0:
        return
    if args.offload_optimizer == OffloadDevice.CPU:
        config.set("zero_optimization.offload_optimizer.device", "cpu", "argument", "offload_optimizer=cpu")
        pin = args.dataloader_pin_memory and not args.use_cpu
        config.set("zero_optimization.offload_optimizer.pin_memory", pin, "derived", "page-locked for faster copies")
    if shape.hidden_size is None:
        return  # DeepSpeed's own sizes
    width = shape.hidden_size
    bucket = max(width * width, _SMALLEST_BUCKET)
    reason = f"{shape.source}, at least {_SMALLEST_BUCKET} elements"
    config.set("zero_optimization.reduce_bucket_size", bucket, "derived", f"hidden size squared, {reason}")
    if stage < 3:
        config.set("zero_optimization.allgather_bucket_size", bucket, "derived", f"hidden size squared, {reason}")
    else:
        prefetch = bucket * 9 // 10
        config.set("zero_optimization.stage3_prefetch_bucket_size", prefetch, "derived", f"0.9 x bucket, {reason}")
        detail = f"10 x hidden size ({shape.source}): vectors stay whole, matrices are sharded"
        config.set("zero_optimization.stage3_param_persistence_threshold", 10 * width, "derived", detail)


def _engine(config: CompiledConfig) -> None:
    # DeepSpeed's throughput timer synchronises the device twice a step; the trainer has its own meter.
    config.set("timers.throughput.enabled", False, "default", "no device synchronisation on the hot path")
    config.set("wall_clock_breakdown", False, "default", "no timers on the hot path")

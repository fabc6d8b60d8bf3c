"""Rules about optimizers of DeepSpeed, and about those of libraries: one rule per package of their table."""

from __future__ import annotations

from collections.abc import Callable

from ds_trainer.config.library_optimizer_table import LIBRARY, LibraryOptimizer
from ds_trainer.config.optimizer_block import TYPES
from ds_trainer.config.rules.rule_context import Rule, RuleContext

_STAGE = "zero_optimization.stage"
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"

OPTIMIZERS = (
    Rule(
        "optimizer-needs-gpu",
        "Optimizers",
        ("optimizer.type",),
        lambda c: (
            c.optimizer in TYPES
            and not TYPES[c.optimizer].on_cpu
            and c.on_cpu
            and not (c.offloads("optimizer") and TYPES[c.optimizer].offloads)
        ),
        "this DeepSpeed optimizer needs a GPU, and this job runs on CPUs",
        "Use optim=adamw_torch.",
    ),
    Rule(
        "optimizer-without-cpu-version",
        "Optimizers",
        ("optimizer.type", _OFFLOAD_OPTIMIZER),
        lambda c: (
            c.offloads("optimizer")
            and c.optimizer in TYPES
            and not TYPES[c.optimizer].offloads
            and c.get("zero_force_ds_cpu_optimizer") is not False
        ),
        "DeepSpeed has no implementation of this optimizer for host memory",
        "Use optim=adamw_torch (or lion, adagrad), keep the optimizer on the device, or set "
        "zero_force_ds_cpu_optimizer to false, which is slow.",
    ),
    Rule(
        "torch-adam-parameters",
        "Optimizers",
        ("optimizer.params.bias_correction", "optimizer.params.fp32_optimizer_states", "optimizer.params.torch_adam"),
        lambda c: (
            c.optimizer in ("adam", "adamw")
            and c.on("optimizer.params.torch_adam")
            and ("optimizer.params.bias_correction" in c.config or "optimizer.params.fp32_optimizer_states" in c.config)
        ),
        "these are parameters of DeepSpeed's Adam, and this job uses torch's",
        "Remove them, or set optimizer.params.torch_adam to false (DeepSpeed compiles its Adam at first use).",
    ),
    Rule(
        "deepspeed-adam-parameters",
        "Optimizers",
        ("optimizer.params.fused", "optimizer.params.foreach", "optimizer.params.torch_adam"),
        lambda c: (
            c.optimizer in ("adam", "adamw")
            and not c.on("optimizer.params.torch_adam")
            and ("optimizer.params.fused" in c.config or "optimizer.params.foreach" in c.config)
        ),
        "these are parameters of torch's Adam, and this job uses DeepSpeed's",
        "Remove them.",
    ),
    Rule(
        "untested-optimizer",
        "Optimizers",
        ("optimizer.type", "zero_allow_untested_optimizer"),
        lambda c: (
            c.stage > 0
            and c.get("zero_allow_untested_optimizer") is False
            and (c.optimizer not in TYPES or not TYPES[c.optimizer].tested)
        ),
        "DeepSpeed has not tested this optimizer with ZeRO and refuses it",
        "Remove zero_allow_untested_optimizer; this package tests the optimizer with ZeRO.",
    ),
    Rule(
        "optimizer-needs-package",
        "Optimizers",
        ("optimizer.type",),
        lambda c: (
            c.optimizer in TYPES
            and TYPES[c.optimizer].package is not None
            and c.lacks(TYPES[c.optimizer].package or "")
        ),
        "this optimizer needs a package that is not installed: mup",
        "Run pip install mup, or use optim=adamw_torch.",
    ),
    Rule(
        "lamb-needs-whole-tensors",
        "Optimizers",
        ("optimizer.type", _STAGE),
        lambda c: c.optimizer == "lamb" and c.stage > 0 and not c.on("fp16.enabled"),
        "Lamb scales the update of each tensor by its norm, and ZeRO shards all tensors into one flat partition per "
        "rank: the results would differ",
        "Set zero_stage=0, or use optim=adamw_torch.",
    ),
    Rule(
        "lamb-in-fp16",
        "Optimizers",
        ("optimizer.type", "fp16.enabled"),
        lambda c: c.optimizer == "lamb" and c.on("fp16.enabled"),
        "Lamb needs whole tensors, which ZeRO shards, and without ZeRO DeepSpeed 0.19.8 does not scale the loss",
        "Use bf16=True, or optim=adamw_torch.",
    ),
    Rule(
        "muon-stage-3-reduce-scatter",
        "Optimizers",
        ("optimizer.type", _STAGE, "zero_optimization.reduce_scatter"),
        lambda c: c.optimizer == "muon" and c.stage == 3 and c.zero("reduce_scatter", True) is True,
        "Muon with ZeRO stage 3 cannot use reduce-scatter",
        "Set zero_optimization.reduce_scatter to false, or use zero_stage=2.",
    ),
    Rule(
        "muon-bf16-stage-1-accumulation",
        "Optimizers",
        ("optimizer.type", "tensor_parallel.autotp_size"),
        lambda c: (
            c.optimizer == "muon"
            and c.model_dtype == "bf16"
            and c.accumulation_dtype == "fp32"
            and c.stage == 1
            and c.layout.tp > 1
        ),
        "Muon in bf16 with float32 accumulation at ZeRO stage 1 cannot be combined with tensor parallelism",
        "Use zero_stage=2, or set tensor_parallel_size=1.",
    ),
)


_LIBRARY_TOPIC = "Library optimizers"


def _with(test: Callable[[RuleContext, LibraryOptimizer], bool]) -> Callable[[RuleContext], bool]:
    return lambda c: c.library is not None and test(c, c.library)


def _needs(package: str) -> Rule:
    return Rule(
        f"optimizer-needs-{package}",
        _LIBRARY_TOPIC,
        ("optim",),
        _with(lambda c, row: row.package == package and c.lacks(package)),
        f"this optimizer needs a package that is not installed: {package}",
        f"Run pip install {package}, or use optim=adamw_torch.",
    )


LIBRARY_OPTIMIZERS = (
    *(_needs(package) for package in dict.fromkeys(row.package for row in LIBRARY.values())),
    Rule(
        "library-optimizer-needs-gpu",
        _LIBRARY_TOPIC,
        ("optim",),
        _with(lambda c, row: c.on_cpu and not row.on_cpu),
        "this optimizer needs a GPU, and this job runs on CPUs",
        "Use optim=galore_adamw, or adamw_torch.",
    ),
    Rule(
        "optimizer-needs-whole-tensors",
        _LIBRARY_TOPIC,
        ("optim", _STAGE),
        _with(lambda c, row: bool(row.shape) and c.stage > 0),
        "this optimizer's update depends on the shape of each tensor, and ZeRO shards all tensors into one flat "
        "partition per rank: the results would differ",
        "Set zero_stage=0 (without offload), or use optim=adamw_torch.",
    ),
    Rule(
        "optimizer-needs-whole-matrices",
        _LIBRARY_TOPIC,
        ("optim", "tensor_parallel.autotp_size", "expert_parallel_size"),
        _with(lambda c, row: bool(row.shape) and c.layout.tp * c.layout.ep > 1),
        "this optimizer's update depends on the shape of each tensor, and tensor and expert parallelism partition them",
        "Set tensor_parallel_size and expert_parallel_size to 1, or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-needs-whole-weights",
        _LIBRARY_TOPIC,
        ("optim", _STAGE),
        _with(lambda c, row: row.swaps and c.stage > 0),
        "this optimizer evaluates and saves averaged weights, which it writes into its own tensors; with ZeRO these "
        "are copies, so the model would not get them",
        "Set zero_stage=0 (without offload), or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-needs-float32",
        _LIBRARY_TOPIC,
        ("optim",),
        _with(lambda c, row: row.swaps and c.model_dtype != "fp32"),
        "this optimizer evaluates and saves averaged weights, which it writes into its own tensors; with bf16 and fp16 "
        "these are float32 copies, so the model would not get them",
        "Turn off bf16 and fp16 (torch_autocast=bf16 works), or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-counts-warmup",
        _LIBRARY_TOPIC,
        ("optim", "warmup_steps"),
        _with(lambda c, row: "warmup_steps" in row.takes and 0 < c.args.warmup_steps < 1),
        "this optimizer does its own warmup, in steps",
        "Set warmup_steps to a number of steps.",
    ),
    Rule(
        "low-rank-needs-modules",
        _LIBRARY_TOPIC,
        ("optim",),
        _with(lambda c, row: row.low_rank and not c.args.optim_target_modules),
        "this optimizer applies to selected matrices",
        "Set optim_target_modules to all-linear, to module names, or to a regular expression.",
    ),
    Rule(
        "modules-need-low-rank",
        _LIBRARY_TOPIC,
        ("optim_target_modules", "optim"),
        lambda c: (
            bool(c.args.optim_target_modules)
            and c.client_optimizer is None
            and not (c.library is not None and c.library.low_rank)
        ),
        "only low-rank optimizers use optim_target_modules",
        "Remove optim_target_modules, or use one of galore_adamw, galore_adafactor, apollo_adamw.",
    ),
)

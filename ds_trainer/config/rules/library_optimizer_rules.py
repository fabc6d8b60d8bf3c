"""Rules about optimizers from libraries, with one rule per package of the table."""

from __future__ import annotations

from collections.abc import Callable

from ds_trainer.config.library_optimizer_table import LIBRARY, LibraryOptimizer
from ds_trainer.config.rules.rule_context import Rule, RuleContext

_STAGE = "zero_optimization.stage"
_TOPIC = "Library optimizers"


def _with(test: Callable[[RuleContext, LibraryOptimizer], bool]) -> Callable[[RuleContext], bool]:
    return lambda c: c.library is not None and test(c, c.library)


def _needs(package: str) -> Rule:
    return Rule(
        f"optimizer-needs-{package}",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: row.package == package and c.lacks(package)),
        f"this optimizer needs a package that is not installed: {package}",
        f"Run pip install {package}, or use optim=adamw_torch.",
    )


LIBRARY_OPTIMIZERS = (
    *(_needs(package) for package in dict.fromkeys(row.package for row in LIBRARY.values())),
    Rule(
        "library-optimizer-needs-gpu",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: c.on_cpu and not row.on_cpu),
        "this optimizer needs a GPU, and this job runs on CPUs",
        "Use optim=galore_adamw, or adamw_torch.",
    ),
    Rule(
        "optimizer-needs-whole-tensors",
        _TOPIC,
        ("optim", _STAGE),
        _with(lambda c, row: bool(row.shape) and c.stage > 0),
        "this optimizer's update depends on the shape of each tensor, and ZeRO shards all tensors into one flat "
        "partition per rank: the results would differ",
        "Set zero_stage=0 (without offload), or use optim=adamw_torch.",
    ),
    Rule(
        "optimizer-needs-whole-matrices",
        _TOPIC,
        ("optim", "tensor_parallel.autotp_size"),
        _with(lambda c, row: bool(row.shape) and c.layout.tp > 1),
        "this optimizer's update depends on the shape of each tensor, and tensor parallelism partitions them",
        "Set tensor_parallel_size=1, or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-needs-whole-weights",
        _TOPIC,
        ("optim", _STAGE),
        _with(lambda c, row: row.swaps and c.stage > 0),
        "this optimizer evaluates and saves averaged weights, which it writes into its own tensors; with ZeRO these "
        "are copies, so the model would not get them",
        "Set zero_stage=0 (without offload), or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-needs-float32",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: row.swaps and c.model_dtype != "fp32"),
        "this optimizer evaluates and saves averaged weights, which it writes into its own tensors; with bf16 and fp16 "
        "these are float32 copies, so the model would not get them",
        "Turn off bf16 and fp16 (torch_autocast=bf16 works), or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-counts-warmup",
        _TOPIC,
        ("optim", "warmup_steps"),
        _with(lambda c, row: "warmup_steps" in row.takes and 0 < c.args.warmup_steps < 1),
        "this optimizer does its own warmup, in steps",
        "Set warmup_steps to a number of steps.",
    ),
    Rule(
        "low-rank-needs-modules",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: row.low_rank and not c.args.optim_target_modules),
        "this optimizer applies to selected matrices",
        "Set optim_target_modules to all-linear, to module names, or to a regular expression.",
    ),
    Rule(
        "modules-need-low-rank",
        _TOPIC,
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

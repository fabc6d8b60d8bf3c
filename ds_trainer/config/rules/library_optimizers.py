"""Rules about optimizers that come with a library; a rule for each package is made from the table."""

from __future__ import annotations

from collections.abc import Callable

from ds_trainer.config.library_optimizers import LIBRARY, LibraryOptimizer
from ds_trainer.config.rules.case import Case, Rule

_STAGE = "zero_optimization.stage"
_TOPIC = "Optimizers of libraries"


def _with(test: Callable[[Case, LibraryOptimizer], bool]) -> Callable[[Case], bool]:
    return lambda c: c.library is not None and test(c, c.library)


def _needs(package: str) -> Rule:
    return Rule(
        f"optimizer-needs-{package}",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: row.package == package and c.lacks(package)),
        f"this optimizer comes with a package that is not installed: {package}",
        f"Run pip install {package}, or use optim=adamw_torch.",
    )


LIBRARY_OPTIMIZERS = (
    *(_needs(package) for package in dict.fromkeys(row.package for row in LIBRARY.values())),
    Rule(
        "library-optimizer-needs-gpu",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: c.on_cpu and not row.on_cpu),
        "this optimizer needs a GPU, and this run is on the CPU",
        "Use optim=galore_adamw, or adamw_torch.",
    ),
    Rule(
        "optimizer-needs-whole-tensors",
        _TOPIC,
        ("optim", _STAGE),
        _with(lambda c, row: bool(row.shape) and c.stage > 0),
        "what this optimizer does depends on the shape of each tensor, and ZeRO cuts all of them into one flat piece a "
        "rank: it would compute other numbers",
        "Set zero_stage=0 (without offload), or use optim=adamw_torch.",
    ),
    Rule(
        "optimizer-needs-uncut-matrices",
        _TOPIC,
        ("optim", "tensor_parallel.autotp_size"),
        _with(lambda c, row: bool(row.shape) and c.layout.tp > 1),
        "what this optimizer does depends on the shape of each tensor, and tensor parallelism cuts them",
        "Set tensor_parallel_size=1, or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-needs-uncut-weights",
        _TOPIC,
        ("optim", _STAGE),
        _with(lambda c, row: row.swaps and c.stage > 0),
        "this optimizer evaluates and saves averaged weights, which it writes into the tensors that it was given; ZeRO "
        "gives it copies, and the model would not see them",
        "Set zero_stage=0 (without offload), or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-needs-float32",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: row.swaps and c.model_dtype != "fp32"),
        "this optimizer evaluates and saves averaged weights, which it writes into the tensors that it was given; bf16 "
        "and fp16 give it float32 copies, and the model would not see them",
        "Leave bf16 and fp16 off (torch_autocast=bf16 works), or use optim=adamw_torch.",
    ),
    Rule(
        "schedule-free-counts-warm-up",
        _TOPIC,
        ("optim", "warmup_steps"),
        _with(lambda c, row: "warmup_steps" in row.takes and 0 < c.args.warmup_steps < 1),
        "this optimizer counts its warm-up itself, in steps",
        "Give warmup_steps as a number of steps.",
    ),
    Rule(
        "low-rank-needs-modules",
        _TOPIC,
        ("optim",),
        _with(lambda c, row: row.low_rank and not c.args.optim_target_modules),
        "this optimizer works on chosen matrices",
        "Set optim_target_modules to all-linear, to names of modules, or to a regular expression.",
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
        "only optimizers of low rank look at modules",
        "Remove optim_target_modules, or use one of galore_adamw, galore_adafactor, apollo_adamw.",
    ),
)

"""Checks of the evaluation arguments: metrics, and the selection of the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_trainer.arguments.enums import SchedulerType


def evaluation_problems(args: Any) -> Iterator[str]:
    """One sentence for each invalid value."""
    for name in args.include_for_metrics:
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

"""What is wrong with arguments about evaluation: metrics, and the best model among checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_trainer.arguments.enums import SchedulerType

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments


def evaluation_problems(args: TrainingArguments) -> list[str]:
    """One sentence for each value that cannot work."""
    problems = [
        f"include_for_metrics={args.include_for_metrics!r}: '{what}' is neither 'inputs' nor 'loss'."
        for what in args.include_for_metrics
        if what not in ("inputs", "loss")
    ]
    if args.bf16_full_eval and args.fp16_full_eval:
        problems.append("bf16_full_eval and fp16_full_eval are different precisions; keep one of them.")
    saving, evaluating = str(args.save_strategy), str(args.eval_strategy)
    if saving == "best" and evaluating == "no":
        problems.append(
            "save_strategy=best saves after evaluations, but eval_strategy=no. Set eval_strategy to steps or epoch."
        )
    if saving == "best" and args.metric_for_best_model is None and not args.load_best_model_at_end:
        problems.append(
            "save_strategy=best needs to know the metric: set metric_for_best_model, to 'loss' for instance."
        )
    if args.metric_for_best_model is None and args.greater_is_better is not None and not _has_default_metric(args):
        problems.append(
            f"greater_is_better={args.greater_is_better!r} compares metrics, but metric_for_best_model is not set. Set "
            "it, or leave greater_is_better out."
        )
    if args.load_best_model_at_end:
        problems += _best_model_problems(args, saving, evaluating)
    return problems


def _has_default_metric(args: TrainingArguments) -> bool:
    """Whether something asks for a metric, which is the loss then."""
    plateau = str(args.lr_scheduler_type) in (SchedulerType.REDUCE_ON_PLATEAU.value, SchedulerType.GREEDY.value)
    return args.load_best_model_at_end or plateau


def _best_model_problems(args: TrainingArguments, saving: str, evaluating: str) -> list[str]:
    """What ``load_best_model_at_end`` cannot work with: every saved model must have been evaluated just before."""
    problems = []
    if args.save_only_model:
        problems.append(
            "load_best_model_at_end=True loads the engine's state, but save_only_model=True keeps weights for users "
            "only. Set one of them to False."
        )
    if saving == "best":
        return problems
    if saving != evaluating or evaluating == "no":
        problems.append(
            f"load_best_model_at_end=True needs an evaluation of every checkpoint, but eval_strategy={evaluating} and "
            f"save_strategy={saving}. Set both to steps, both to epoch, or save_strategy to best."
        )
    elif evaluating == "steps":
        every, save = args.eval_steps or args.logging_steps, args.save_steps
        # Fractions are compared as millionths: 0.3 is no multiple of 0.1 in binary.
        a, b = (round(save * 1_000_000), round(every * 1_000_000))
        if every > 0 and save > 0 and ((every < 1) != (save < 1) or a % b != 0):
            problems.append(
                f"load_best_model_at_end=True needs an evaluation of every checkpoint: save_steps={save!r} must be a "
                f"multiple of eval_steps={every!r}, both steps or both fractions."
            )
    return problems

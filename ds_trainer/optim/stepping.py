"""When a schedule is stepped, and with what: after each optimizer step, or after each evaluation with a metric."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ds_trainer.arguments.completion import evaluation_metric
from ds_trainer.arguments.enums import IntervalStrategy, SchedulerType
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, did_you_mean

_PREFIX = "eval_"


def rate_of(optimizer: torch.optim.Optimizer) -> Any:
    """The learning rate of the first group as it is now, a number or a tensor; does not wait for a device."""
    rate = optimizer.param_groups[0]["lr"]
    return rate.clone() if isinstance(rate, torch.Tensor) else rate  # a schedule writes into tensors


def steps_on_metric(schedule: Any) -> bool:
    """Whether ``schedule`` is stepped with a metric after an evaluation, and not after each optimizer step.

    True for both of ours and for any other whose ``step`` takes ``metrics``, as torch's ReduceLROnPlateau does.
    """
    return "metrics" in inspect.signature(schedule.step).parameters


def metric_of(args: TrainingArguments) -> str:
    """Name of the metric that such a schedule follows: ``metric_for_best_model``, else the evaluation's loss."""
    return evaluation_metric(args.metric_for_best_model or "loss")


def step_on_metric(schedule: Any, metrics: Mapping[str, float], args: TrainingArguments) -> None:
    """Step ``schedule`` with the metric of an evaluation: the main process's value on every rank. Collective.

    Raises:
        ConfigError: the evaluation has no such metric.
    """
    name = metric_of(args)
    value = distributed.broadcast_object(metrics.get(name))
    if value is None:
        said = f"metric_for_best_model={args.metric_for_best_model!r} ({args.where('metric_for_best_model')})"
        raise ConfigError(
            f"The schedule follows the metric '{name}' ({said}), which the evaluation does not have. It has "
            f"{', '.join(metrics)}.{did_you_mean(name, metrics)} Set metric_for_best_model to one of them."
        )
    schedule.step(float(value))


def check_stepping(schedule: Any, args: TrainingArguments, eval_names: Iterable[str]) -> None:
    """Refuse a schedule that would never be stepped, or with a metric that no evaluation gives.

    Args:
        schedule: one that was handed in, or None for the one that ``args`` describe.
        args: the arguments.
        eval_names: names of the evaluation datasets, where there are several.

    Raises:
        ConfigError: with what to change.
    """
    if schedule is None:
        said, on_metric = f"lr_scheduler_type={args.lr_scheduler_type}", follows_metric(args)
    else:
        said = f"optimizers=(..., {type(schedule).__name__}) handed to the Trainer"
        on_metric = steps_on_metric(schedule)
    if not on_metric:
        return
    if args.eval_strategy == IntervalStrategy.NO:
        raise ConfigError(
            f"{said} follows a metric, but eval_strategy=no ({args.where('eval_strategy')}): there would be none. Set "
            "eval_strategy to steps or epoch."
        )
    name, names = metric_of(args), list(eval_names)
    if names and not any(name.startswith(f"{_PREFIX}{each}_") for each in names):
        raise ConfigError(
            f"{said} follows the metric '{name}', but evaluation is on several datasets ({', '.join(names)}), whose "
            f"metrics are named after them. Set metric_for_best_model, for example to '{_PREFIX}{names[0]}_loss'."
        )


def follows_metric(args: TrainingArguments) -> bool:
    """Whether ``lr_scheduler_type`` is one that follows a metric."""
    return str(args.lr_scheduler_type) in (str(SchedulerType.REDUCE_ON_PLATEAU), str(SchedulerType.GREEDY))

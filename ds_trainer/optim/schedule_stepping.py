"""When schedules are stepped: after each optimizer step, or after each evaluation with a metric."""

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


def current_lr(optimizer: torch.optim.Optimizer) -> Any:
    """The current learning rate of the first group, a number or a tensor; does not synchronize a device."""
    rate = optimizer.param_groups[0]["lr"]
    return rate.clone() if isinstance(rate, torch.Tensor) else rate  # a schedule writes into tensors


def with_rates_of_the_optimizer(schedule: Any) -> Any:
    """``schedule``; transformers' ``AdafactorSchedule``, which only reports rates, made to report them here too.

    That class asks the optimizer for the rates of parameters that have gradients. The engine has cleared those when the
    schedule is stepped, so the rates of parameters with a state are taken instead. Before the first step there are
    none: then it is the schedule's initial rate.
    """
    bases = {(base.__module__, base.__name__) for base in type(schedule).__mro__}
    if ("transformers.optimization", "AdafactorSchedule") not in bases or hasattr(schedule, "reads_states"):
        return schedule
    # a subclass and not an attribute: a schedule saves all its attributes in its state_dict
    schedule.__class__ = type(type(schedule).__name__, (_RatesOfStates, type(schedule)), {})
    return schedule


class _RatesOfStates:
    optimizer: Any
    base_lrs: list[float]
    reads_states = True

    def get_lr(self) -> list[float]:
        rates = []
        for group, initial in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            state = self.optimizer.state.get(group["params"][0])
            rates.append(float(self.optimizer._get_lr(group, state)) if state else initial)
        return rates


def steps_on_metric(schedule: Any) -> bool:
    """Whether ``schedule`` is stepped with a metric after evaluations instead of after each optimizer step.

    True for any schedule whose ``step`` takes ``metrics``, such as torch's ReduceLROnPlateau.
    """
    return "metrics" in inspect.signature(schedule.step).parameters


def metric_of(args: TrainingArguments) -> str:
    """Name of the metric that such a schedule follows: ``metric_for_best_model``, else the evaluation's loss."""
    return evaluation_metric(args.metric_for_best_model or "loss")


def step_on_metric(schedule: Any, metrics: Mapping[str, float], args: TrainingArguments) -> None:
    """Steps ``schedule`` with a metric of an evaluation: the main process's value on every rank. Collective.

    Raises:
        ConfigError: the evaluation does not have the metric.
    """
    name = metric_of(args)
    value = distributed.broadcast_object(metrics.get(name))
    if value is None:
        source = f"metric_for_best_model={args.metric_for_best_model!r} ({args.where('metric_for_best_model')})"
        raise ConfigError(
            f"The schedule follows the metric '{name}' ({source}), which the evaluation does not have. It has "
            f"{', '.join(metrics)}.{did_you_mean(name, metrics)} Set metric_for_best_model to one of them."
        )
    schedule.step(float(value))


def check_stepping(schedule: Any, args: TrainingArguments, eval_names: Iterable[str]) -> None:
    """Checks that a schedule that follows a metric will be stepped, with a metric that the evaluations have.

    Args:
        schedule: the schedule that the user passed, or None for that of ``args``.
        args: the arguments.
        eval_names: names of the evaluation datasets, if there are several.

    Raises:
        ConfigError: it will not.
    """
    if schedule is None:
        source, on_metric = f"lr_scheduler_type={args.lr_scheduler_type}", follows_metric(args)
    else:
        source = f"optimizers=(..., {type(schedule).__name__}) passed to the Trainer"
        on_metric = steps_on_metric(schedule)
    if not on_metric:
        return
    if args.eval_strategy == IntervalStrategy.NO:
        raise ConfigError(
            f"{source} follows a metric, but there are no evaluations: eval_strategy=no "
            f"({args.where('eval_strategy')}). Set eval_strategy to steps or epoch."
        )
    name, names = metric_of(args), list(eval_names)
    if names and not any(name.startswith(f"{_PREFIX}{each}_") for each in names):
        raise ConfigError(
            f"{source} follows the metric '{name}', but there are several evaluation datasets ({', '.join(names)}), "
            "whose names are part of the metrics' names. Set metric_for_best_model, for example to "
            f"'{_PREFIX}{names[0]}_loss'."
        )


def follows_metric(args: TrainingArguments) -> bool:
    """Whether ``lr_scheduler_type`` is one that follows a metric."""
    return str(args.lr_scheduler_type) in (str(SchedulerType.REDUCE_ON_PLATEAU), str(SchedulerType.GREEDY))

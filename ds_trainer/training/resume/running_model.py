"""Describes the model of a resumed run, to map numbered optimizer states to parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.converters.transformers_reader import RunningModel
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.library_optimizer_table import library_optimizer
from ds_trainer.optim.optimizer_builder import parameters_of_groups
from ds_trainer.optim.schedule_stepping import steps_on_metric


def running_model(
    model: nn.Module,
    args: TrainingArguments,
    config: CompiledConfig,
    groups: list[dict[str, Any]],
    given: tuple[Any, Any],
    optimizer_class: type[torch.optim.Optimizer] | None,
) -> RunningModel:
    """The model of a training and the parameter groups of its optimizer, which need not exist yet.

    Args:
        model: the module.
        args: the training arguments.
        config: the compiled configuration.
        groups: the parameter groups that the Trainer builds.
        given: optimizer and schedule of the user; either may be None.
        optimizer_class: the class in ``optimizer_cls_and_kwargs``.
    """
    optimizer, schedule = given
    members = parameters_of_groups(groups if optimizer is None else optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [[names[id(parameter)] for parameter in group if id(parameter) in names] for group in members]
    if schedule is not None:
        follows_metric = steps_on_metric(schedule)
    else:
        follows_metric = args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    return RunningModel(model, named, _optimizer_name(args, config, optimizer, optimizer_class), follows_metric)


def _optimizer_name(
    args: TrainingArguments, config: CompiledConfig, given: Any, optimizer_class: type[torch.optim.Optimizer] | None
) -> str:
    if given is not None:
        return type(given).__name__
    if optimizer_class is not None:
        return optimizer_class.__name__
    if library_optimizer(args) is not None:
        return str(args.optim)
    return str(config.optimizer_type)

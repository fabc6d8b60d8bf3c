"""Derives the configuration of a run from arguments, model, data and subclass, before anything starts.

This needs no process group and no device. All problems are collected and raised together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.accelerator_config import split_problems
from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.enums import IntervalStrategy
from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.config.environment import Environment
from ds_trainer.data.columns import base_model, find_label_names
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.data.stream import length_of
from ds_trainer.optim.schedule_stepping import check_stepping
from ds_trainer.optim.schedules import check_schedule
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.training.job_devices import JobDevices
from ds_trainer.training.loop.batches import check_run_length
from ds_trainer.training.loop.loss_rule import LossRule, loss_rule_of
from ds_trainer.training.loop.run_plan import RunPlan, batch_plan_of
from ds_trainer.training.loop.source_losses import check_sources
from ds_trainer.training.model.preparation import check_model
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils.errors import ConfigError, Problems, listed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.model.label_smoothing import LabelSmoother
    from ds_trainer.training.protocol import TrainerProtocol

logger = get_logger(__name__)

_NOT_TRAINED = (
    "This model supports evaluation and generation, with whole sequences on every rank of a replica, but no training. "
    "%s"
)


@dataclass(frozen=True, kw_only=True)
class TrainerInputs:
    """The inputs of the Trainer.

    Attributes:
        model: the module.
        args: the training arguments.
        train_dataset, eval_dataset, processing_class, compute_metrics, compute_loss_func: constructor arguments.
        optimizer, lr_scheduler: from ``optimizers``; None if the arguments describe them.
        optimizer_class: class, arguments and origin of ``optimizer_cls_and_kwargs``.
        compute_loss: the method of the Trainer or its subclass.
        overridden: names of the methods that a subclass overrides.
        class_name: name of the Trainer class, for messages.
        data_collator: makes batches.
    """

    model: nn.Module
    args: TrainingArguments
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    compute_loss_func: Callable[..., torch.Tensor] | None
    optimizer: Any
    lr_scheduler: Any
    optimizer_class: tuple[type[torch.optim.Optimizer], dict[str, Any], str] | None
    compute_loss: Callable[..., Any]
    overridden: Collection[str]
    class_name: str
    data_collator: Any = None

    @classmethod
    def of(cls, trainer: TrainerProtocol, optimizer_class: Any, overridden: Collection[str]) -> TrainerInputs:
        """The current values of the constructor arguments of ``trainer``."""
        return cls(
            model=trainer.model,
            args=trainer.args,
            train_dataset=trainer.train_dataset,
            eval_dataset=trainer.eval_dataset,
            processing_class=trainer.processing_class,
            compute_metrics=trainer.compute_metrics,
            compute_loss_func=trainer.compute_loss_func,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            optimizer_class=optimizer_class,
            compute_loss=trainer.compute_loss,
            overridden=overridden,
            class_name=type(trainer).__name__,
            data_collator=trainer.data_collator,
        )


@dataclass(frozen=True)
class RunConfiguration:
    """The derived configuration.

    Attributes:
        layout: the layout of the job.
        config: the compiled DeepSpeed configuration.
        label_names: keys of a batch that may have labels.
        sharder: shards the sequences of a replica's batch over its ranks; None without sequence sharding.
        unsharded: reasons against the sequence sharding that the layout requests; if there are any, the model can be
            evaluated, but not trained.
        smoother: computes the loss with label smoothing; None without it.
        rule: turns the loss of a micro-batch into a contribution to the loss of the global batch.
    """

    layout: ParallelLayout
    config: CompiledConfig
    label_names: list[str]
    sharder: SequenceSharder | None
    unsharded: list[str]
    smoother: LabelSmoother | None
    rule: LossRule


def configure(inputs: TrainerInputs) -> RunConfiguration:
    """Derive the configuration from ``inputs``.

    Raises:
        ConfigError: the run cannot work; lists all problems.
    """
    args, model, overridden = inputs.args, inputs.model, inputs.overridden
    problems = Problems()
    label_names = list(args.label_names) if args.label_names is not None else find_label_names(model)
    label_names = label_names if args.label_names is not None else label_names or ["labels", "label"]
    if args.eval_strategy != IntervalStrategy.NO and inputs.eval_dataset is None:
        problems.add(f"eval_strategy={args.eval_strategy}, but there is no eval_dataset: pass one, or set it to no.")
    problems.extend(metrics_problems(args, inputs.compute_metrics))
    overrides_loss = "compute_loss" in overridden
    layout = config = sharder = None
    unsharded: list[str] = []
    with problems.collecting():
        if "get_train_dataloader" not in overridden:
            check_run_length(inputs.train_dataset, args)
        layout = ParallelLayout.of(args, args.world_size)
        with problems.collecting():
            config = compile_run(inputs, layout)
        with problems.collecting():
            _check_schedule(inputs, config)
        if layout.cp * layout.sp > 1:
            from ds_trainer.training.model.sequence_sharding.setup import sharder_or_problems

            sharder, unsharded = sharder_or_problems(
                model,
                layout,
                label_names=label_names,
                processing_class=inputs.processing_class,
                loss_function=inputs.compute_loss_func,
                overrides_loss=overrides_loss,
            )
        with problems.collecting():
            check_packing_support(inputs, layout)
        with problems.collecting():
            check_sources(args, inputs.train_dataset)
        if config is not None:
            check_model(
                model,
                args,
                config,
                layout,
                overrides_loss=overrides_loss,
                loss_function=inputs.compute_loss_func is not None,
                sharding_problems=() if inputs.train_dataset is None else unsharded,
                trained=inputs.train_dataset is not None,
            )
    problems.raise_if_any()
    assert layout is not None and config is not None
    if unsharded:
        logger.warning(_NOT_TRAINED, " ".join(unsharded))
    smoother = None
    if args.label_smoothing_factor:
        from ds_trainer.training.model.label_smoothing import label_smoother

        smoother = label_smoother(model, args.label_smoothing_factor, label_names)
    rule = loss_rule_of(
        base_model(model),
        label_names,
        compute_loss=inputs.compute_loss if overrides_loss else None,
        loss_function=inputs.compute_loss_func is not None,
        smoothed=smoother is not None,
    )
    if args.global_router_aux_loss or (rule.auxiliary and layout.cp * layout.sp > 1):
        from ds_trainer.training.loop.router_balance import router_balance_of

        rule.balance = router_balance_of(base_model(model), layout, args.global_router_aux_loss)
    return RunConfiguration(
        layout=layout,
        config=config,
        label_names=label_names,
        sharder=sharder,
        unsharded=unsharded,
        smoother=smoother,
        rule=rule,
    )


def check_packing_support(inputs: TrainerInputs, layout: ParallelLayout) -> None:
    """Refuse packed rows for a model or Trainer that cannot use them.

    Raises:
        ConfigError: one sentence for each reason.
    """
    if not packs(inputs.args):
        return
    from ds_trainer.training.model.packing.support import packing_problems

    problems = packing_problems(
        inputs.model, inputs.args, layout, inputs.overridden, inputs.compute_metrics is not None, inputs.data_collator
    )
    if problems and inputs.train_dataset is not None:
        raise ConfigError(problems)


OWN_OPTIMIZER = frozenset({"create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"})
"""Methods by which a subclass builds the optimizer."""


def compile_run(inputs: TrainerInputs, layout: ParallelLayout) -> CompiledConfig:
    """The DeepSpeed configuration of a run.

    Raises:
        ConfigError: settings contradict each other or cannot work; lists all problems.
    """
    args, overridden = inputs.args, inputs.overridden
    client_optimizer = None
    if inputs.optimizer is not None:
        client_optimizer = f"optimizers=({type(inputs.optimizer).__name__}, ...) passed to the Trainer"
    elif inputs.optimizer_class is not None:
        client_optimizer = inputs.optimizer_class[2]
    elif own := sorted(OWN_OPTIMIZER & set(overridden)):
        client_optimizer = f"{inputs.class_name}.{own[0]}"
    total_steps = None
    # Packed rows are counted when the loader is made.
    counted = args.max_steps > 0 or not packs(args)
    known = counted and length_of(inputs.train_dataset) is not None and "get_train_dataloader" not in overridden
    if known and not split_problems(args, layout.dp):  # compile_config reports these with all others
        micro_steps = batch_plan_of(args, layout).micro_steps(len(inputs.train_dataset))
        total_steps = RunPlan.of(args, micro_steps).max_steps
    shape = ModelShape.from_model(inputs.model)
    config = compile_config(
        args=args,
        layout=layout,
        shape=shape,
        device=args.device_type,
        client_optimizer=client_optimizer,
        environment=Environment(),
        total_steps=total_steps,
        cluster=_cluster(args),
    )
    doubles = [name for name, parameter in inputs.model.named_parameters() if parameter.dtype == torch.float64]
    if doubles and config.precision.dtype == "fp32" and (config.zero_stage > 0 or layout.world_size > 1):
        raise ConfigError(
            f"{listed(doubles, 3)} of {type(inputs.model).__name__} are float64, which DeepSpeed trains on one rank "
            "with zero_stage=0 only. Call model.float() before it is passed to the Trainer."
        )
    return config


def _cluster(args: TrainingArguments) -> Cluster | None:
    """The machines of the job; None if they are not known."""
    devices = JobDevices.of_job(args, args.world_size)
    return None if devices is None else devices.cluster


def _check_schedule(inputs: TrainerInputs, config: CompiledConfig | None) -> None:
    args, given = inputs.args, inputs.lr_scheduler
    in_file = None if config is None else config.scheduler
    if in_file is not None:  # DeepSpeed steps this one; nothing would step a second one
        other = None
        if given is not None:
            other = f"optimizers=(..., {type(given).__name__}) passed to the Trainer"
        elif "create_scheduler" in inputs.overridden:
            other = f"{inputs.class_name}.create_scheduler builds another one"
        if other is not None:
            raise ConfigError(f"{in_file.source} has a scheduler, but {other}. Keep one of them.")
    by_arguments = given is None and "create_scheduler" not in inputs.overridden and in_file is None
    if by_arguments:
        check_schedule(args.lr_scheduler_type, as_mapping(args.lr_scheduler_kwargs), args.learning_rate)
    if by_arguments or given is not None:
        check_stepping(given, args, inputs.eval_dataset if isinstance(inputs.eval_dataset, dict) else ())


def metrics_problems(args: TrainingArguments, compute_metrics: Any) -> list[str]:
    """Problems with the arguments for metrics."""
    problems = []
    if args.batch_eval_metrics and compute_metrics is None:
        problems.append(
            "batch_eval_metrics=True, but there is no compute_metrics. Pass one, or set batch_eval_metrics=False."
        )
    elif args.batch_eval_metrics and not accepted_arguments(compute_metrics, {"compute_result"}):
        problems.append(
            "batch_eval_metrics=True calls compute_metrics for every batch, with compute_result=True for the last one, "
            "but it has no such argument. Add it, and return the metrics of all batches if it is true."
        )
    if args.include_for_metrics and compute_metrics is None:
        problems.append(
            f"include_for_metrics={args.include_for_metrics!r}, but there is no compute_metrics that would receive "
            "them."
        )
    return problems

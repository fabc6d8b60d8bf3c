"""What is decided before anything starts: the configuration, the loss rule, and which hooks are a subclass's."""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer.arguments.enums import IntervalStrategy
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.config.environment import Environment
from ds_trainer.data.columns import base_model, find_label_names
from ds_trainer.data.stream import length_of
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.training.batches import check_run_length
from ds_trainer.training.hooks.data import DataHooks
from ds_trainer.training.hooks.evaluation import check_metrics
from ds_trainer.training.hooks.optimizer import OptimizerHooks
from ds_trainer.training.hooks.step import StepHooks
from ds_trainer.training.label_smoothing import label_smoother
from ds_trainer.training.loss import LossRule, loss_rule_of
from ds_trainer.training.model.preparation import check_model
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.sequence import cut_or_reasons
from ds_trainer.training.signatures import accepted_arguments, is_overridden
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_NOT_TRAINED = (
    "This model can be evaluated and can generate, every rank of a replica on whole sequences, but not be trained. %s"
)


class PlanHooks(OptimizerHooks, DataHooks, StepHooks):
    """Arithmetic over arguments, model and subclass; no process group, no device."""

    _settled_with: dict[str, Any]  # the arguments when everything here was last decided

    def _settle(self) -> None:
        """Decide all that follows from arguments, model and subclass; anew where the arguments have changed.

        Raises:
            ConfigError: what is asked for cannot run.
        """
        found = find_label_names(self.model) or ["labels", "label"]
        self.label_names = found if self.args.label_names is None else list(self.args.label_names)
        if self.args.eval_strategy != IntervalStrategy.NO and self.eval_dataset is None:
            raise ConfigError(
                f"eval_strategy={self.args.eval_strategy}, but there is no eval_dataset: pass one, or set it to no."
            )
        check_metrics(self.args, self.compute_metrics)
        if not is_overridden(self, DataHooks, "get_train_dataloader"):
            check_run_length(self.train_dataset, self.args)
        self.layout = ParallelLayout.of(self.args, self.args.world_size)
        self.compiled = self._compile()
        by_arguments = self.lr_scheduler is None and not is_overridden(self, OptimizerHooks, "create_scheduler")
        self.check_scheduler(self.lr_scheduler, made_by_arguments=by_arguments and "scheduler" not in self.compiled)
        own_loss = is_overridden(self, StepHooks, "compute_loss")
        loss_function = self.compute_loss_func is not None
        self.sequence_cut, self._uncut = cut_or_reasons(
            self.model,
            self.layout,
            label_names=self.label_names,
            processing_class=self.processing_class,
            loss_function=self.compute_loss_func,
            own_loss=own_loss,
        )
        check_model(
            self.model,
            self.args,
            self.compiled,
            self.layout,
            own_loss=own_loss,
            loss_function=loss_function,
            uncut=() if self.train_dataset is None else self._uncut,
            trained=self.train_dataset is not None,
        )
        if self._uncut:
            logger.warning(_NOT_TRAINED, " ".join(self._uncut))
        self.label_smoother = label_smoother(self.model, self.args.label_smoothing_factor, self.label_names)
        self.create_accelerator_and_postprocess()
        self.loss_rule = loss_rule_of(
            base_model(self.model),
            self.label_names,
            compute_loss=self.compute_loss if own_loss else None,
            loss_function=loss_function,
            smoothed=self.label_smoother is not None,
        )
        self._look_at_hooks()
        self._kept_loaders = {}
        self._settled_with = dict(vars(self.args))

    def _compile(self) -> CompiledConfig:
        client_optimizer = None
        if self.optimizer is not None:
            client_optimizer = f"optimizers=({type(self.optimizer).__name__}, ...) handed to the Trainer"
        elif self._optimizer_class is not None:
            client_optimizer = self._optimizer_class[2]
        elif is_overridden(self, OptimizerHooks, "create_optimizer"):
            client_optimizer = f"{type(self).__name__}.create_optimizer"
        total_steps = None
        if length_of(self.train_dataset) is not None and not is_overridden(self, DataHooks, "get_train_dataloader"):
            total_steps = RunPlan.of(self.args, self.batch_plan.rounds(len(self.train_dataset))).max_steps
        compiled = compile_config(
            self.args,
            self.layout,
            ModelShape.from_model(self.model),
            self.args.device_type,
            client_optimizer,
            Environment(),
            total_steps,
        )
        if "scheduler" in compiled:  # DeepSpeed steps the file's; a second one would never be stepped
            place = compiled.origin("scheduler.type").place
            if self.lr_scheduler is not None:
                given = type(self.lr_scheduler).__name__
                raise ConfigError(
                    f"{place} has a scheduler, but optimizers=(..., {given}) handed to the Trainer. Keep one of them."
                )
            if is_overridden(self, OptimizerHooks, "create_scheduler"):
                given = f"{type(self).__name__}.create_scheduler"
                raise ConfigError(f"{place} has a scheduler, but {given} makes another one. Keep one of them.")
        return compiled

    def _class_of_optimizer(
        self, given: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any], str] | None:
        if given is not None:
            return (*given, f"optimizer_cls_and_kwargs=({given[0].__name__}, ...) handed to the Trainer")
        return None

    def _look_at_hooks(self) -> None:
        """Which of the hooks are a subclass's, and what they take: asked once, not for every micro-batch."""
        self._compute_loss_takes = accepted_arguments(self.compute_loss, {"num_items_in_batch"})
        self._training_step_takes = accepted_arguments(self.training_step, {"num_items_in_batch"})
        hooks = ("compute_loss", "training_step", "get_batch_samples")
        self._nobody_looks_at_counts = self.compute_loss_func is None and not any(
            is_overridden(self, StepHooks, hook) for hook in hooks
        )

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the loss is a sum divided by ``num_items_in_batch``; set it to False for one that is a mean."""
        return self.loss_rule.normalised

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self.loss_rule = LossRule(self.loss_rule.count, value, self.loss_rule.auxiliary)

    loss_is_scaled_for_ga = model_accepts_loss_kwargs  # its newer name

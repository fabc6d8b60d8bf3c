"""The optimizer and its schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.library_optimizers import library_optimizer
from ds_trainer.engine.weights import full_numel
from ds_trainer.optim.choice import build_given_optimizer, optimizer_class_and_arguments
from ds_trainer.optim.library_optimizers import build_library_optimizer
from ds_trainer.optim.optimizers import build_optimizer, decay_parameter_names, is_built_here, parameter_groups
from ds_trainer.optim.schedules import build_schedule, check_schedule
from ds_trainer.optim.stepping import check_stepping
from ds_trainer.training.hooks.parts import Parts
from ds_trainer.training.signatures import is_overridden
from ds_trainer.utils.errors import ConfigError


class OptimizerHooks(Parts):
    """What makes the optimizer and its schedule, and questions about them."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what is not there yet: ``self.optimizer``, then ``self.lr_scheduler``.

        What DeepSpeed builds itself (its own optimizers; a ``scheduler`` of the DeepSpeed file, and any schedule over
        such an optimizer) is None here and made with the engine.
        """
        if self.optimizer is None:
            self.optimizer = self.create_optimizer()
        if self.lr_scheduler is None and self.optimizer is not None and "scheduler" not in self.compiled:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer | None:
        """Make ``self.optimizer`` if there is none yet; None for one that DeepSpeed builds.

        Parameters are in two groups, with and without weight decay.

        Args:
            model: whose parameters it updates; default: the trainer's.
        """
        if self.optimizer is not None:
            return self.optimizer
        over = self.model if model is None else model
        library = library_optimizer(self.args)
        if self._optimizer_class is not None:
            cls, arguments, _ = self._optimizer_class
            self.optimizer = build_given_optimizer(cls, arguments, over, self.parameter_groups(over))
        elif library is not None:
            self.optimizer = build_library_optimizer(self.args, library, over, self.parameter_groups(over))
        elif is_built_here(self.compiled):
            self.optimizer = build_optimizer(self.compiled, self.parameter_groups(over))
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class and keyword arguments of ``args.optim``, without weight decay: that is in the parameter groups."""
        return optimizer_class_and_arguments(args, model)

    def parameter_groups(self, model: nn.Module | None = None) -> list[dict[str, Any]]:
        """Trainable parameters with and without weight decay."""
        model = self.model if model is None else model
        return parameter_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make ``self.lr_scheduler`` over ``num_training_steps`` optimizer steps if there is none yet.

        Args:
            num_training_steps: optimizer steps of the whole training.
            optimizer: whose learning rates it sets; default: the trainer's.

        Raises:
            ConfigError: there is no optimizer.
        """
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            if optimizer is None:
                raise ConfigError("create_scheduler needs an optimizer: call create_optimizer first, or pass one.")
            self.lr_scheduler = build_schedule(
                self.args.lr_scheduler_type,
                optimizer,
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                as_mapping(self.args.lr_scheduler_kwargs),
            )
        return self.lr_scheduler

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is not the one that the arguments describe, but the user's."""
        return self._given_optimizers[1] is not None or is_overridden(self, OptimizerHooks, "create_scheduler")

    def check_scheduler(self, given: Any, *, made_by_arguments: bool) -> None:
        """Refuse a schedule that cannot run, before anything starts.

        Args:
            given: the one handed to the Trainer, or None.
            made_by_arguments: whether ``lr_scheduler_type`` decides.

        Raises:
            ConfigError: wrong ``lr_scheduler_kwargs``, or no metric to follow.
        """
        if made_by_arguments:
            kwargs = as_mapping(self.args.lr_scheduler_kwargs)
            check_schedule(self.args.lr_scheduler_type, kwargs, self.args.learning_rate)
        if made_by_arguments or given is not None:
            check_stepping(given, self.args, self.eval_dataset if isinstance(self.eval_dataset, dict) else ())

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but biases and norms."""
        return decay_parameter_names(model)

    # -- questions ------------------------------------------------------------------------------------------------

    def get_num_trainable_parameters(self) -> int:
        """Elements of all trainable parameters; whole tensors also where only a shard is here (ZeRO-3)."""
        return sum(full_numel(p) for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self._existing_optimizer().param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """The parameter group that ``param`` is in; without ``param`` the parameters of all groups, a list each.

        Args:
            param: a parameter of the model, or its name.

        Raises:
            ConfigError: there is no optimizer yet, or ``param`` is in none of its groups.
        """
        optimizer = self._existing_optimizer()
        if param is None:
            return [group["params"] for group in optimizer.param_groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        # ZeRO puts its partitions into the groups: the groups as they were made still know the model's parameters.
        for group, members in zip(optimizer.param_groups, self._group_members or members_of(optimizer), strict=True):
            if any(member is wanted for member in members):
                return group
        raise ConfigError(f"get_optimizer_group: {param if isinstance(param, str) else 'this tensor'} is in no group.")

    def _existing_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError("There is no optimizer yet: it is made by train() or create_optimizer().")
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _check_optimizer_and_schedule(self) -> None:
        """Refuse an optimizer over anything but this model's parameters, and a second schedule.

        Raises:
            ConfigError: the optimizer was made for another model, or an engine before has put its partitions into it;
                or there is a schedule although the DeepSpeed file has one.
        """
        if "scheduler" in self.compiled and self.lr_scheduler is not None:
            raise ConfigError(
                f"{self.compiled.origin('scheduler.type').place} has a scheduler, but {type(self).__name__} made a "
                f"{type(self.lr_scheduler).__name__} (self.lr_scheduler). Keep one of them."
            )
        if self.optimizer is None:
            return
        own = {id(p) for p in self.model.parameters()}
        if any(id(p) not in own for group in self.optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"The {type(self.optimizer).__name__} handed to the Trainer holds tensors that are not parameters of "
                "its model: it was made for another model, or an earlier train() has put ZeRO's partitions into it. "
                "Make it anew from model.parameters(), or pass optimizer_cls_and_kwargs=(class, arguments) instead."
            )


def members_of(optimizer: torch.optim.Optimizer | list[dict[str, Any]]) -> list[list[Any]]:
    """The parameters of each group of an optimizer, or of groups."""
    groups = optimizer if isinstance(optimizer, list) else optimizer.param_groups
    return [list(group["params"]) for group in groups]

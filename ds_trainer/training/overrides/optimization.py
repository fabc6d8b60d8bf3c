"""Methods of the Trainer for the optimizer and its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.library_optimizer_table import library_optimizer
from ds_trainer.engine.weights import full_numel
from ds_trainer.optim.library_optimizer_builder import (
    build_given_optimizer,
    build_library_optimizer,
    optimizer_class_and_arguments,
)
from ds_trainer.optim.optimizer_builder import (
    build_optimizer,
    decay_parameter_names,
    is_built_here,
    parameters_of_groups,
)
from ds_trainer.optim.schedule_stepping import with_rates_of_the_optimizer
from ds_trainer.optim.schedules import build_schedule
from ds_trainer.optim.script_optimizers import check_divided_updates, check_weight_swapping
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.overrides.base import TrainerBase
from ds_trainer.training.startup.configuration import OWN_OPTIMIZER
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.training.protocol import TrainerProtocol


class Optimization(TrainerBase):
    """Builds the optimizer and its schedule, and returns information about them."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build ``self.optimizer`` and then ``self.lr_scheduler``, unless they exist.

        If DeepSpeed builds them (its own optimizers; a ``scheduler`` of the DeepSpeed file; any schedule of such an
        optimizer), they stay None until the engine is built.
        """
        if self.optimizer is None:
            built = self.create_optimizer()  # of a script: it may set the attribute, return it, or both
            self.optimizer = built if self.optimizer is None else self.optimizer
        if self.lr_scheduler is None and self.optimizer is not None and "scheduler" not in self._ds_trainer.compiled:
            built = self.create_scheduler(num_training_steps, self.optimizer)
            self.lr_scheduler = built if self.lr_scheduler is None else self.lr_scheduler

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer | None:
        """Build ``self.optimizer`` if there is none yet; returns None if DeepSpeed builds it.

        It does not if a subclass overrides this method or ``get_optimizer_cls_and_kwargs``. Parameters are in two
        groups, with and without weight decay.

        Args:
            model: the model that it updates; default: that of the Trainer.
        """
        if self.optimizer is not None:
            return self.optimizer
        assembly, over = self._ds_trainer, self.model if model is None else model
        library = library_optimizer(self.args)
        if assembly.optimizer_class is not None:
            cls, arguments, _ = assembly.optimizer_class
            self.optimizer = build_given_optimizer(cls, arguments, over, assembly.parameter_groups(over))
        elif not OWN_OPTIMIZER.isdisjoint(assembly.overridden):
            cls, arguments = self.get_optimizer_cls_and_kwargs(self.args, over)
            source = f"get_optimizer_cls_and_kwargs of {type(self).__name__}"
            self.optimizer = build_given_optimizer(cls, arguments, over, assembly.parameter_groups(over), source)
        elif library is not None:
            self.optimizer = build_library_optimizer(self.args, library, over, assembly.parameter_groups(over))
        elif is_built_here(assembly.compiled):
            self.optimizer = build_optimizer(assembly.compiled, assembly.parameter_groups(over))
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class and keyword arguments of ``args.optim``. Weight decay is not included: the parameter groups have it.

        A subclass may return another class, or groups of parameters as ``params`` or ``optimizer_dict``.
        """
        return optimizer_class_and_arguments(args, model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Build ``self.lr_scheduler`` over ``num_training_steps`` optimizer steps if there is none yet.

        Args:
            num_training_steps: optimizer steps of the whole training.
            optimizer: the optimizer; default: that of the Trainer.

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

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all except biases and norms."""
        return decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Number of elements in all trainable parameters; with ZeRO-3 those of the whole tensors, not of the shards."""
        return sum(full_numel(p) for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in _existing(self.optimizer).param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """The parameter group of ``param``; without ``param``, a list of the parameters of each group.

        Args:
            param: a parameter of the model, or its name.

        Raises:
            ConfigError: there is no optimizer yet, or none of its groups has ``param``.
        """
        optimizer = _existing(self.optimizer)
        if param is None:
            return [group["params"] for group in optimizer.param_groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        # ZeRO replaces the parameters in the groups by its flat partitions, so search the original parameters.
        for group, members in zip(
            optimizer.param_groups, self._ds_trainer.group_parameters or parameters_of_groups(optimizer), strict=True
        ):
            if any(member is wanted for member in members):
                return group
        raise ConfigError(f"get_optimizer_group: {param if isinstance(param, str) else 'this tensor'} is in no group.")


def use_optimizers(trainer: TrainerProtocol, optimizer: Any, lr_scheduler: Any) -> None:
    """Use this optimizer and schedule; None means that the next training builds one."""
    trainer.optimizer, trainer.lr_scheduler = optimizer, with_rates_of_the_optimizer(lr_scheduler)


def _existing(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is None:
        raise ConfigError("There is no optimizer yet: train() or create_optimizer() builds it.")
    return optimizer


def check_optimizer(trainer: TrainerProtocol, config: CompiledConfig, layout: ParallelLayout) -> None:
    """Reject an optimizer with other parameters than those of the model, or that ZeRO changes, and a second schedule.

    Args:
        trainer: has model, optimizer and schedule; the last two are None if DeepSpeed builds them.
        config: the compiled configuration.
        layout: where the ranks are.

    Raises:
        ConfigError: the optimizer was built for another model, or an earlier engine has put its partitions into it; its
            weights or updates are others where tensors are divided; or there is a schedule although the DeepSpeed file
            has one.
    """
    optimizer, lr_scheduler, class_name = trainer.optimizer, trainer.lr_scheduler, type(trainer).__name__
    if config.scheduler is not None and lr_scheduler is not None:
        raise ConfigError(
            f"{config.scheduler.source} has a scheduler, but {class_name} has built a "
            f"{type(lr_scheduler).__name__} (self.lr_scheduler). Keep one of them."
        )
    if optimizer is None:
        return
    parameters = {id(p) for p in trainer.model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in given if id(p) not in parameters]
    if 0 < len(foreign) < len(given):
        raise ConfigError(
            f"{len(foreign)} of the {len(given)} tensors of the {type(optimizer).__name__} (of the shapes "
            f"{', '.join(map(str, foreign[:3]))}{', ...' if foreign[3:] else ''}) are not parameters of the model, "
            "but of a loss or another module. The engine trains and saves those of the model. Make the other module a "
            "part of it before the Trainer is built: model.extra = loss_module, or model[0].extra = loss_module if the "
            "model calls its parts one by one, as those of sentence-transformers do."
        )
    if foreign:
        raise ConfigError(
            f"The {type(optimizer).__name__} passed to the Trainer has tensors that are not parameters of its "
            "model: it was built for another model, or an earlier train() has put ZeRO's partitions into it. "
            "Build it from model.parameters() again, or pass optimizer_cls_and_kwargs=(class, arguments) instead."
        )
    check_weight_swapping(optimizer, config.zero_stage, config.precision.dtype)
    if library_optimizer(trainer.args) is None:
        check_divided_updates(optimizer, config.zero_stage, layout.tp, layout.ep)

"""The optimizer and its schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.optim.optimizers import build_optimizer, decay_parameter_names, is_built_here, parameter_groups
from ds_trainer.optim.schedules import build_schedule
from ds_trainer.training.hooks.parts import Parts


class OptimizerHooks(Parts):
    """What makes the optimizer and its schedule, and questions about them."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not handed in: ``self.optimizer``, then ``self.lr_scheduler``.

        What DeepSpeed builds itself (its own optimizers; a ``scheduler`` of the DeepSpeed file, and any schedule over
        such an optimizer) is None here and made with the engine.
        """
        if self.optimizer is None:
            self.optimizer = self.create_optimizer()
        if self.lr_scheduler is None and self.optimizer is not None and "scheduler" not in self.compiled:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the compiled configuration, kept in ``self.optimizer``; None for one that DeepSpeed builds.

        Parameters are in two groups, with and without weight decay.
        """
        self.optimizer = (
            build_optimizer(self.compiled, self.parameter_groups()) if is_built_here(self.compiled) else None
        )
        return self.optimizer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters with and without weight decay."""
        return parameter_groups(self.model, self.get_decay_parameter_names(self.model), self.args.weight_decay)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The learning-rate schedule over ``num_training_steps`` optimizer steps; kept in ``self.lr_scheduler``."""
        self.lr_scheduler = build_schedule(
            self.args.lr_scheduler_type,
            self.optimizer if optimizer is None else optimizer,
            self.args.get_warmup_steps(num_training_steps),
            num_training_steps,
            as_mapping(self.args.lr_scheduler_kwargs),
        )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but biases and norms."""
        return decay_parameter_names(model)

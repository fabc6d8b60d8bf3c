"""Verifies on the first micro-batch of a run whether its loss uses the item count, as the loss rule assumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_trainer.training.loop.auxiliary_loss import warn_of_undivided_part
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.loss_computation import LossComputation, LossMethod
from ds_trainer.utils import distributed


class FirstLoss:
    """Computes the loss of the first micro-batch with an item count that is part of the graph.

    Args:
        losses: has the rule to verify.
        method: computes the loss.
        count: items of the global batch.
    """

    def __init__(self, losses: LossComputation, method: LossMethod, count: ItemCount) -> None:
        self._losses = losses
        self._method = method
        self._count = count.divisor.clone().requires_grad_()
        self._contribution: torch.Tensor | None = None

    def compute(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Compute the loss of ``inputs``, and verify the rule, with the same result on all ranks. Collective."""
        losses, rule = self._losses, self._losses.rule
        loss: torch.Tensor = losses.of(self._method, model, dict(inputs), self._count)
        rule.verify(loss, self._count, lambda items: self._without_graph(model, dict(inputs), items))
        # A rank without targets in its shard cannot decide.
        if distributed.agree(torch.tensor([int(not rule.normalized)]))[0] and rule.normalized:
            rule.reject()
        return loss

    def _without_graph(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            loss: torch.Tensor = self._losses.of(self._method, model, inputs, items)
        model.train()
        return loss

    def before_backward(self, contribution: torch.Tensor, several_micro_batches: bool) -> None:
        """Keep the gradient of ``contribution`` for :meth:`after_backward`, if there are several micro-batches."""
        if self._losses.rule.normalized and contribution.requires_grad and several_micro_batches:
            contribution.retain_grad()
            self._contribution = contribution

    def after_backward(self) -> None:
        """Warn if a part of the loss is not divided by the item count. Waits for the device."""
        if self._contribution is not None:
            warn_of_undivided_part(self._count, self._contribution)

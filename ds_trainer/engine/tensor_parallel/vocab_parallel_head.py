"""A vocabulary-parallel head: the logits are partitioned over the tensor-parallel ranks along the vocabulary.

The loss of a causal language model does not need full logits: maximum, sum and the target's logit are reduced over the
ranks, which saves the largest tensor of the step. All other consumers of logits receive the full tensor: generation,
predictions, metrics, and custom losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def install_logit_gathering(model: nn.Module, in_training: bool, given_loss: Callable[..., Any] | None) -> None:
    """Gathers the logits unless only the distributed loss reads them.

    Args:
        model: the model that DeepSpeed has partitioned.
        in_training: gather also while gradients are recorded; without gradients logits are always gathered.
        given_loss: a custom loss function of the model; it is restored and receives full logits.
    """
    from deepspeed.module_inject.layers import GatherFromTensorParallelRegion, VocabParallelLinear

    head = next((module for module in model.modules() if isinstance(module, VocabParallelLinear)), None)
    if head is None:
        return
    always = in_training or given_loss is not None

    def gather(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor | None:
        if not always and torch.is_grad_enabled():
            return None
        gathered: torch.Tensor = GatherFromTensorParallelRegion.apply(module.mp_group, logits, module._partition_sizes)
        return gathered

    head.register_forward_hook(gather)
    owner: Any = model
    distributed_loss = owner.loss_function
    first, last, vocab_size = head.vocab_start_index, head.vocab_end_index, head.vocab_size

    def loss(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if logits.shape[-1] == vocab_size:  # gathered: take this rank's slice
            logits = logits[..., first:last]
        return distributed_loss(logits, *arguments, **keywords)

    owner.loss_function = given_loss if given_loss is not None else loss


def custom_loss_function(model: nn.Module) -> Callable[..., Any] | None:
    """The loss function that was assigned to ``model``; None if it uses its architecture's."""
    given = vars(model).get("_loss_function") or vars(model).get("loss_function")
    return given if callable(given) else None

"""A head whose logits are spread over the tensor-parallel ranks, each holding some words of the vocabulary.

The loss of a causal language model needs no whole logits: maximum, sum and the target's logit are reduced over the
ranks, which saves the largest tensor of the step. Everybody else who looks at logits needs all of them: generation,
predictions, metrics, and losses that are not the model's own. They get whole ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def install_whole_logits(model: nn.Module, in_training: bool, given_loss: Callable[..., Any] | None) -> None:
    """Hand out whole logits wherever the distributed loss is not all that needs them.

    Args:
        model: cut by DeepSpeed.
        in_training: also where gradients are recorded; without gradients logits are always whole.
        given_loss: a loss function that the model brought along; it is put back and gets whole logits.
    """
    from deepspeed.module_inject.layers import GatherFromTensorParallelRegion, VocabParallelLinear

    head = next((module for module in model.modules() if isinstance(module, VocabParallelLinear)), None)
    if head is None:
        return
    always = in_training or given_loss is not None

    def gather(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor | None:
        if not always and torch.is_grad_enabled():
            return None
        whole: torch.Tensor = GatherFromTensorParallelRegion.apply(module.mp_group, logits, module._partition_sizes)
        return whole

    head.register_forward_hook(gather)
    owner: Any = model
    distributed_loss = owner.loss_function
    first, last, words = head.vocab_start_index, head.vocab_end_index, head.vocab_size

    def loss(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if logits.shape[-1] == words:  # gathered: this rank's part of them
            logits = logits[..., first:last]
        return distributed_loss(logits, *arguments, **keywords)

    owner.loss_function = given_loss if given_loss is not None else loss


def loss_of_its_own(model: nn.Module) -> Callable[..., Any] | None:
    """The loss function that somebody gave to ``model``; None for the one of its architecture."""
    given = vars(model).get("_loss_function") or vars(model).get("loss_function")
    return given if callable(given) else None

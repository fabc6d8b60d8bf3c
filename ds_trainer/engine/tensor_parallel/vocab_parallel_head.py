"""A vocabulary-parallel head: the logits are partitioned over the tensor-parallel ranks along the vocabulary.

The loss of a causal language model does not need full logits: maximum, sum and the target's logit are reduced over the
ranks, which saves the largest tensor of the step. All other consumers of logits receive the full tensor: generation,
predictions, metrics, and custom losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ds_trainer.parallel.deferred_logits import DeferredLogits

RETURNS_LOSSES = "ds_trainer_returns_losses"
"""Attribute of a head while it returns losses instead of logits."""
GATHERS_LOGITS = "ds_trainer_gathers_logits"
"""Attribute of a head while its logits are gathered in any case."""


@dataclass(frozen=True)
class VocabularySlice:
    """The rows of the vocabulary that a rank has.

    Attributes:
        classes: rows on all ranks.
        offset: the first one of this rank.
        group: the ranks.
    """

    classes: int
    offset: int
    group: ProcessGroup


def vocabulary_slice(head: Any) -> VocabularySlice | None:
    """The rows that ``head`` holds; None unless AutoTP has partitioned it along the vocabulary."""
    if getattr(head, "mp_group", None) is None:
        return None
    from deepspeed.module_inject.layers import LinearLayer, VocabParallelLinear

    if type(head) is not VocabParallelLinear and not (type(head) is LinearLayer and head.gather_output):
        return None
    sizes = head._partition_sizes
    return VocabularySlice(sum(sizes), sum(sizes[: head.tp_index]), head.mp_group)


def install_logit_gathering(
    model: nn.Module, in_training: bool, given_loss: Callable[..., Any] | None, own_loss: Callable[..., Any] | None
) -> None:
    """Gathers the logits unless only the distributed loss reads them.

    Args:
        model: the model that DeepSpeed has partitioned.
        in_training: gather also while gradients are recorded; without gradients logits are always gathered.
        given_loss: a custom loss function of the model; it is restored and receives full logits.
        own_loss: the loss function of the architecture, for deferred logits, which are never partitioned.
    """
    from deepspeed.module_inject.layers import GatherFromTensorParallelRegion, VocabParallelLinear

    head = next((module for module in model.modules() if isinstance(module, VocabParallelLinear)), None)
    if head is None:
        return
    always = in_training or given_loss is not None

    def gather(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor | None:
        if RETURNS_LOSSES in vars(module):
            return None
        if not always and torch.is_grad_enabled() and GATHERS_LOGITS not in vars(module):
            return None
        gathered: torch.Tensor = GatherFromTensorParallelRegion.apply(module.mp_group, logits, module._partition_sizes)
        return gathered

    head.register_forward_hook(gather)
    owner: Any = model
    distributed_loss = owner.loss_function
    first, last, vocab_size = head.vocab_start_index, head.vocab_end_index, head.vocab_size

    def loss(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(logits, DeferredLogits) and own_loss is not None:
            return own_loss(logits, *arguments, **keywords)
        if logits.shape[-1] == vocab_size:  # gathered: take this rank's slice
            logits = logits[..., first:last]
        return distributed_loss(logits, *arguments, **keywords)

    owner.loss_function = given_loss if given_loss is not None else loss


def custom_loss_function(model: nn.Module) -> Callable[..., Any] | None:
    """The loss function that was assigned to ``model``; None if it uses its architecture's."""
    given = vars(model).get("_loss_function") or vars(model).get("loss_function")
    return given if callable(given) else None

"""``LinearHead``: the output embedding of a model, with its loss in tiles.

Supported are ``nn.Linear``, AutoTP's slice of one along the vocabulary, and PEFT's LoRA around an ``nn.Linear``. Under
ZeRO-3 a weight is whole while its module runs, between DeepSpeed's hooks. So the loss is computed *in* the head: its
``forward`` is replaced for one call, and what the hooks see is a module that returns losses. The head is called once in
a forward pass, as without this, so ranks with batches of different lengths run the same modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ds_trainer.data.columns import base_model
from ds_trainer.engine.tensor_parallel.vocab_parallel_head import GATHERS_LOGITS, RETURNS_LOSSES, vocabulary_slice
from ds_trainer.parallel.linear_cross_entropy import (
    ElementwiseFunction,
    TileSettings,
    linear_cross_entropy,
    tile_sizes,
)
from ds_trainer.parallel.one_pass_cross_entropy import chunk_tokens, one_pass_cross_entropy

_CHUNK_TOKENS = 1024
Terms = list[tuple[torch.Tensor, torch.Tensor]]
Check = Callable[[Terms, "torch.Tensor | None", torch.Tensor, TileSettings, torch.Tensor, bool], None]


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The module that computes the logits of ``model``, or None if the model does not name one."""
    getter = getattr(base_model(model), "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if not isinstance(head, nn.Module):
        return None
    copies = getattr(head, "modules_to_save", None)  # PEFT trains a copy of it
    if isinstance(copies, nn.ModuleDict) and hasattr(head, "original_module"):
        names = [name for name in getattr(head, "active_adapters", ()) if name in copies]
        chosen: nn.Module = copies[names[0]] if names else head.original_module  # type: ignore[assignment]
        return chosen
    return head


def head_problem(head: nn.Module | None) -> str | None:
    """Why the loss of ``head`` cannot be computed in tiles; None if it can."""
    if head is None:
        return "the model does not name its head (get_output_embeddings)"
    name = type(head).__name__
    if getattr(head, "_compiled_call_impl", None) is not None:
        return f"its head, {name}, is compiled"
    if type(head) is nn.Linear or vocabulary_slice(head) is not None:
        return None
    if _is_lora(head):
        base = getattr(head, "base_layer", None)
        if type(base) is not nn.Linear:
            return f"the layer under the LoRA of its head is {type(base).__name__}, not nn.Linear"
        if getattr(head, "lora_variant", None) or any(getattr(head, "lora_bias", {}).values()):
            return "the LoRA of its head has a variant (DoRA) or a bias"
        return None
    return f"its head is {name}, not nn.Linear"


def _is_lora(head: nn.Module) -> bool:
    return type(head).__name__ == "Linear" and type(head).__module__.startswith("peft.tuners.lora")


class LinearHead:
    """Computes logits and losses of a supported head; a ``HeadReader`` of the deferred logits.

    Args:
        head: the module.
        chunk_tokens: tokens of a tile; None for a good choice.
        z_loss: the factor of the z-loss, now.
        one_pass: whether there is room for the gradients of a sum between the passes, now.
        check: called with what is computed and the result, while the weights are whole; None: nothing to check.

    Attributes:
        chunk_tokens: tokens whose logits may exist together for other readers than the loss.
        classes: the size of the vocabulary, over all ranks.
    """

    def __init__(
        self,
        head: nn.Module,
        chunk_tokens: int | None,
        z_loss: Callable[[], float],
        one_pass: Callable[[], bool],
        check: Callable[[], Check | None],
    ) -> None:
        self._head: Any = head
        self._slice = vocabulary_slice(head)
        self._tile_tokens = chunk_tokens
        self.chunk_tokens = chunk_tokens or _CHUNK_TOKENS
        self._z_loss, self._one_pass = z_loss, one_pass
        self._check = check
        # Read now: in a forward pass under ZeRO-3, to look at a weight is to gather it.
        linear: Any = head.base_layer if _is_lora(head) else head
        weight = linear.weight
        whole = getattr(weight, "ds_shape", weight.shape)[0]
        self.classes = int(whole) if self._slice is None else self._slice.classes

    def can_run(self) -> bool:
        """Whether the state of the head allows tiles now: LoRA that is merged into the weight does not."""
        if not _is_lora(self._head):
            return True
        return not self._head.merged and not self._head.disable_adapters

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits, whole."""
        with _attribute(self._head, GATHERS_LOGITS, True):
            logits: torch.Tensor = self._head._call_impl(hidden)
        return logits

    def pieces(
        self,
        hidden: torch.Tensor,
        functions: tuple[ElementwiseFunction, ...],
        use: Callable[[Callable[[Any], torch.Tensor]], Any],
    ) -> Any:
        """``use(logits_of)``; see ``HeadReader``. Ranks may make different numbers of pieces, except those that share
        the vocabulary.
        """
        result: list[Any] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            terms, bias = self._terms(hidden)

            def logits_of(index: Any) -> torch.Tensor:
                products = [F.linear(x[:, index].contiguous(), weight) for x, weight in terms]
                logits = sum(products[1:], start=products[0])
                logits = self._whole_vocabulary(logits if bias is None else logits + bias)
                for function in functions:
                    logits = function(logits, slice(0, self.classes))
                return logits

            result.append(use(logits_of))
            return hidden.new_zeros(())  # hooks at the output of the head see no logits

        with _attribute(self._head, "forward", forward), _attribute(self._head, RETURNS_LOSSES, True):
            self._head._call_impl(hidden)
        return result[0]

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` of all classes from those of this rank's."""
        part = self._slice
        if part is None:
            return logits
        whole = logits.new_zeros(*logits.shape[:-1], part.classes)
        whole[..., part.offset : part.offset + logits.shape[-1]] = logits
        dist.all_reduce(whole, group=part.group)
        return whole

    def losses(
        self,
        hidden: torch.Tensor,
        functions: tuple[ElementwiseFunction, ...],
        targets: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        summed: bool,
    ) -> torch.Tensor:
        """The loss of each token, or the sum of them; see ``HeadReader``."""
        tokens, rows = tile_sizes(self._tile_tokens, hidden.device)
        part = self._slice
        settings = TileSettings(
            chunk_tokens=tokens,
            vocabulary_chunk=rows,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=self._z_loss(),
            functions=functions,
            classes=None if part is None else part.classes,
            offset=0 if part is None else part.offset,
            group=None if part is None else part.group,
        )
        one_pass = summed and torch.is_grad_enabled() and self._one_pass()
        if one_pass:  # ranks that share the vocabulary make as many chunks
            own = self.classes if part is None else -(-self.classes // dist.get_world_size(part.group))
            settings = replace(settings, chunk_tokens=chunk_tokens(own, hidden.device, self._tile_tokens))

        def compute(terms: Terms, bias: torch.Tensor | None) -> torch.Tensor:
            in_one = one_pass and any(one.requires_grad for pair in terms for one in pair)
            if in_one:
                loss, losses = one_pass_cross_entropy(terms, bias, targets, settings)
            else:
                losses = linear_cross_entropy(terms, bias, targets, settings)
                loss = losses.sum() if summed else losses
            check = self._check()
            if check is not None:
                check(terms, bias, targets, settings, losses, in_one)
            return loss

        return self.in_head(hidden, compute)

    def in_head(
        self, hidden: torch.Tensor, compute: Callable[[Terms, torch.Tensor | None], torch.Tensor]
    ) -> torch.Tensor:
        """``compute(terms, bias)`` in the place of the head's ``forward``, where its weights are whole.

        Args:
            hidden: the input of the head.
            compute: gets the products whose sum the logits are (input and weight of each), and the bias of the head.
        """
        with (
            _attribute(self._head, "forward", lambda hidden: compute(*self._terms(hidden))),
            _attribute(self._head, RETURNS_LOSSES, True),
        ):
            result: torch.Tensor = self._head._call_impl(hidden)
        return result

    def _terms(self, hidden: torch.Tensor) -> tuple[Terms, torch.Tensor | None]:
        """The products whose sum the logits are, and the bias."""
        head = self._head
        if not _is_lora(head):
            return [(hidden, head.weight)], head.bias
        terms: Terms = [(hidden, head.base_layer.weight)]
        for name in head.active_adapters:
            if name in head.lora_A:
                down = head.lora_A[name]
                inner = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * head.scaling[name]
                terms.append((inner, head.lora_B[name].weight))
        return terms, head.base_layer.bias


@contextmanager
def _attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside, ``module`` itself has an attribute, beside those of its class."""
    missing = object()
    before = module.__dict__.get(name, missing)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before

"""Attention over sharded sequences: all-to-all over heads, ring over context-parallel ranks, all-to-all back.

The sharding of the current batch is a module global, not a context variable: activation checkpointing runs the forward
pass a second time during the backward pass, on an autograd thread that does not see our context variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from ds_trainer.parallel.document_attention import active_documents, can_attend, document_attention
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.ring_attention import cast_for_attention, ring_attention
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.parallel.ulysses import gather_heads, scatter_heads


@dataclass(eq=False)
class ActiveSharding:
    """The sharding of the current batch.

    Attributes:
        plan: which rank holds which tokens, and which tokens may attend to each other.
        groups: the process groups of the plan's layout.
        calls: how many times attention ran under this sharding (recomputation counts again). A model whose forward pass
            leaves it at 0 does not mix tokens through our attention, so its sequences must not be sharded.
    """

    plan: SequencePlan
    groups: ParallelGroups
    calls: int = 0

    @property
    def local_length(self) -> int:
        """Tokens of each sequence that one rank holds."""
        layout = self.plan.layout
        return self.plan.length // (layout.cp * layout.sp)


_active: ActiveSharding | None = None


@contextmanager
def use_sharding(plan: SequencePlan | None, groups: ParallelGroups | None) -> Iterator[ActiveSharding | None]:
    """Inside, attention treats its tokens as this rank's shard of ``plan``.

    Enter it around the forward *and* the backward pass of a micro-batch. With ``plan=None`` attention inside treats
    sequences as unsharded, even within an outer sharding.
    """
    global _active
    outer = _active
    if plan is None:
        _active = None
    else:
        if groups is None:
            raise ValueError("use_sharding needs process groups with a sequence plan")
        _active = ActiveSharding(plan, groups)
    try:
        yield _active
    finally:
        _active = outer


def active_sharding() -> ActiveSharding | None:
    """The sharding in effect, or None."""
    return _active


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Self-attention for custom models; works the same with and without sequence sharding.

    Args:
        query: ``[batch, heads, tokens, head_dim]``.
        key, value: the same shape, with the same number of heads or a divisor of it (GQA, MQA).
        causal: tokens do not attend to later tokens.
        window: with ``causal``, a token attends to itself and the ``window - 1`` tokens before it; otherwise to
            ``window`` tokens on either side.
        scale: factor of the scores; ``head_dim ** -0.5`` if None.
        attention_mask: ``[batch, tokens]``, 0 for padding, which no token attends to.
        position_ids: ``[batch or 1, tokens]``. Without an ``attention_mask``, a position that is not the previous one
            plus 1 starts a new document, and attention stays within a document (the convention of transformers).

    With sequence sharding the last two arguments are ignored: the plan of the batch holds the same information for the
    full sequence.

    Returns:
        ``[batch, heads, tokens, head_dim of value]``; 0 for a token that attends to nothing.

    Raises:
        ValueError: query and key have different numbers of tokens; the tokens are not this rank's shard; the number of
            heads is not divisible by the sequence-parallel size.
    """
    sharding = _active
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(f"self-attention of {query.shape[-2]} query tokens over {key.shape[-2]} key tokens")
    if sharding is None:
        return _unsharded(
            query=query,
            key=key,
            value=value,
            causal=causal,
            window=window,
            scale=scale,
            attention_mask=attention_mask,
            position_ids=position_ids,
        )
    if query.shape[-2] != sharding.local_length:
        raise ValueError(
            f"attention got {query.shape[-2]} tokens, but this rank's shard has {sharding.local_length} of "
            f"{sharding.plan.length} ({sharding.plan.layout.describe()})"
        )
    sharding.calls += 1
    if query.shape[1] == 0:
        # Tensor parallelism over more ranks than key heads leaves some ranks without heads, and with them all ranks
        # that they would exchange with. The empty result must stay in the autograd graph: its gradient is expected.
        return scaled_dot_product_attention(query, key, value)
    ulysses = sharding.plan.layout.sp > 1
    if ulysses:
        query, key, value = (cast_for_attention(tensor) for tensor in (query, key, value))  # halves the traffic
        query, key, value = scatter_heads(query, key, value, sharding.groups.sp)
    result = ring_attention(
        query,
        key,
        value,
        plan=sharding.plan,
        group=sharding.groups.cp,
        cp_rank=sharding.groups.coordinates.cp,
        causal=causal,
        window=window,
        scale=scale,
    )
    return gather_heads(result, sharding.groups.sp) if ulysses else result


def _unsharded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> torch.Tensor:
    tokens, device, documents = query.shape[-2], query.device, active_documents()
    if (
        documents is not None
        and attention_mask is None
        and position_ids is not None
        and tuple(position_ids.shape) == documents.shape
        and can_attend(documents, query, key, value)
    ):
        return document_attention(
            query=query, key=key, value=value, documents=documents, causal=causal, window=window, scale=scale
        )
    mask: torch.Tensor | None = None
    if attention_mask is not None:
        mask = attention_mask.to(device=device, dtype=torch.bool)[:, None, None, :]
    elif position_ids is not None:
        breaks = position_ids.to(device).diff(dim=-1) != 1
        if breaks.any():  # one device sync per call, cheaper than a [tokens, tokens] mask for every sequence
            numbers = torch.nn.functional.pad(breaks.cumsum(-1), (1, 0))
            mask = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    if window is not None:
        positions = torch.arange(tokens, device=device)
        distance = positions[:, None] - positions[None, :]
        in_window = distance < window if causal else distance.abs() <= window
        mask = in_window if mask is None else mask & in_window
    if mask is not None and causal:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )

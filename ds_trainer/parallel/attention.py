"""Attention that knows how the sequence is cut: all-to-all over heads, ring over context ranks, all-to-all back.

The cut of the batch in work is a module global and not a context variable: when activations are recomputed, the
forward pass runs a second time inside of the backward pass, on a thread of autograd that sees no context of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from ds_trainer.parallel.context import cast_for_attention, ring_attention
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.sequence import gather_heads, scatter_heads
from ds_trainer.parallel.sequence_plan import SequencePlan


@dataclass(eq=False)
class RunningCut:
    """The cut of the batch in work.

    Attributes:
        plan: who holds which token, and which may see each other.
        groups: the process groups of its layout.
        calls: how often attention was computed under it (a recomputation counts again). A model whose forward pass
            leaves it at 0 mixes no tokens by our attention, and so must not be cut.
    """

    plan: SequencePlan
    groups: ParallelGroups
    calls: int = 0

    @property
    def local_length(self) -> int:
        """Tokens of each sequence that one rank holds."""
        layout = self.plan.layout
        return self.plan.length // (layout.cp * layout.sp)


_running: RunningCut | None = None


@contextmanager
def use_cut(plan: SequencePlan | None, groups: ParallelGroups | None) -> Iterator[RunningCut | None]:
    """While inside, attention takes its tokens for this rank's part of ``plan``. Enter it around the forward *and* the
    backward pass of a micro-batch. None for ``plan``: nothing is cut inside, whatever is cut outside."""
    global _running
    before = _running
    if plan is None:
        _running = None
    else:
        if groups is None:
            raise ValueError("a sequence plan without process groups")
        _running = RunningCut(plan, groups)
    try:
        yield _running
    finally:
        _running = before


def active_cut() -> RunningCut | None:
    """The cut that holds now, or None."""
    return _running


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
    """Self-attention for models of one's own, whole and cut along the sequence alike.

    Args:
        query: ``[batch, heads, tokens, head_dim]``.
        key, value: the same; as many heads, or a divisor of them (GQA, MQA).
        causal: a token sees no later one.
        window: with ``causal`` a token sees itself and the ``window - 1`` before it, else ``window`` to either side.
        scale: of the scores; ``head_dim ** -0.5`` where None.
        attention_mask: ``[batch, tokens]``, 0 where a token is padding that nobody may see.
        position_ids: ``[batch or 1, tokens]``. Where there is no ``attention_mask``, a position that does not follow
            the one before begins another document, and documents do not see each other (as transformers takes it).

    Under a cut the last two arguments are not looked at: the plan of the batch says the same for the whole sequence.

    Returns:
        ``[batch, heads, tokens, head_dim of value]``; 0 for a token that may see nothing.

    Raises:
        ValueError: query and key differ in tokens; the tokens are not this rank's part of the cut batch; the heads
            cannot be divided by the sequence-parallel ranks.
    """
    cut = _running
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(f"self-attention of {query.shape[-2]} query tokens over {key.shape[-2]} key tokens")
    if cut is None:
        return _whole(query, key, value, causal, window, scale, attention_mask, position_ids)
    if query.shape[-2] != cut.local_length:
        raise ValueError(
            f"attention got {query.shape[-2]} tokens, but the part of this rank is {cut.local_length} of "
            f"{cut.plan.length} ({cut.plan.layout.describe()})"
        )
    cut.calls += 1
    if query.shape[1] == 0:
        # Tensor parallelism over more ranks than there are key heads leaves some without any, and with them all ranks
        # that they would exchange with. What is empty still belongs to the graph: gradients of no elements are awaited.
        return scaled_dot_product_attention(query, key, value)
    exchanged = cut.plan.layout.sp > 1
    if exchanged:
        query, key, value = (cast_for_attention(tensor) for tensor in (query, key, value))  # travel at half the size
        query, key, value = scatter_heads(query, key, value, cut.groups.sp)
    result = ring_attention(
        query,
        key,
        value,
        plan=cut.plan,
        group=cut.groups.cp,
        cp_rank=cut.groups.place.cp,
        causal=causal,
        window=window,
        scale=scale,
    )
    return gather_heads(result, cut.groups.sp) if exchanged else result


def _whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> torch.Tensor:
    tokens, device = query.shape[-2], query.device
    mask: torch.Tensor | None = None
    if attention_mask is not None:
        mask = attention_mask.to(device=device, dtype=torch.bool)[:, None, None, :]
    elif position_ids is not None:
        breaks = position_ids.to(device).diff(dim=-1) != 1
        if breaks.any():  # waits for the device, once a call: less than a [tokens, tokens] mask for a whole sequence
            documents = torch.nn.functional.pad(breaks.cumsum(-1), (1, 0))
            mask = (documents[:, :, None] == documents[:, None, :])[:, None]
    if window is not None:
        places = torch.arange(tokens, device=device)
        behind = places[:, None] - places[None, :]
        near = behind < window if causal else behind.abs() <= window
        mask = near if mask is None else mask & near
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

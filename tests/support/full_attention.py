"""Attention of one process, written out: scores, a mask made entry by entry, softmax. No kernel, no code of ours."""

from __future__ import annotations

import torch


def full_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    documents: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[batch, heads, tokens, dim]`` each; a row that may see nothing gives 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    tokens = query.shape[2]
    sees = torch.ones(query.shape[0], tokens, tokens, dtype=torch.bool)
    for q in range(tokens):
        for k in range(tokens):
            if causal and k > q:
                sees[:, q, k] = False
            if window is not None and (q - k >= window if causal else abs(q - k) > window):
                sees[:, q, k] = False
    if documents is not None:
        sees &= documents[:, :, None] == documents[:, None, :]
    if valid is not None:
        sees &= valid[:, None, :]
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return weights @ value


def packed(batch: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random documents side by side: their numbers and the positions inside of each, ``[batch, tokens]`` int64."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(batch, tokens, generator=generator) < 3 / tokens
    starts[:, 0] = False
    documents = starts.long().cumsum(-1)
    positions = torch.arange(tokens).expand(batch, -1)
    first = torch.where(starts, positions, 0).cummax(-1).values
    return documents, positions - first


def padded(batch: int, tokens: int) -> torch.Tensor:
    """Row ``i`` has ``3 i`` tokens of padding at its end: ``[batch, tokens]`` bool, false there."""
    return torch.arange(tokens)[None, :] < tokens - 3 * torch.arange(batch)[:, None]

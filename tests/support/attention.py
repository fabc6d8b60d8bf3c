"""Attention by its definition: the oracle of everything that computes it in blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_trainer.parallel.sequence_plan import SequencePlan


def allowed_pairs(plan: SequencePlan, batch: int, causal: bool, window: int | None) -> Tensor:
    """Which query may see which key: bool ``[batch, length, length]`` in the order of the sequence."""
    query, key = torch.arange(plan.length)[:, None], torch.arange(plan.length)[None, :]
    allowed = (key <= query) if causal else torch.ones(plan.length, plan.length, dtype=torch.bool)
    if window is not None:
        allowed = allowed & ((key > query - window) if causal else ((query - key).abs() <= window))
    allowed = allowed.expand(batch, -1, -1)
    if plan.documents is not None:
        allowed = allowed & (plan.documents[:, :, None] == plan.documents[:, None, :])
    if plan.valid is not None:
        allowed = allowed & plan.valid[:, None, :]
    return allowed


def dense_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, differentiable by autograd. ``allowed``: ``[batch, queries, keys]``; empty rows: 0."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~allowed[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return weights @ value, lse

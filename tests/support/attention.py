"""Attention by its definition: the oracle of everything that computes it in blocks."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from ds_trainer.parallel.document_runs import DocumentRuns
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan

_given: weakref.WeakKeyDictionary[SequencePlan, tuple[Tensor | None, Tensor | None]] = weakref.WeakKeyDictionary()


def plan_of(
    layout: ParallelLayout, length: int, documents: Tensor | None = None, valid: Tensor | None = None
) -> SequencePlan:
    """The plan for the documents and the validity of all tokens, ``[batch, length]`` each."""
    plan = SequencePlan(layout, length, DocumentRuns.of(documents, valid))
    _given[plan] = documents, valid
    return plan


def tokens_of(plan: SequencePlan, rows: int) -> tuple[Tensor, Tensor]:
    """Documents and validity of all tokens of a plan, ``[rows, length]`` each."""
    runs = plan.documents
    if runs is None:
        return torch.zeros(rows, plan.length, dtype=torch.int64), torch.ones(rows, plan.length, dtype=torch.bool)
    assert runs.rows == rows and runs.length == plan.length
    sizes = torch.diff(runs.starts, append=torch.tensor([rows * plan.length]))
    valid = torch.ones(len(sizes), dtype=torch.bool) if runs.valid is None else runs.valid
    documents, is_valid = (part.repeat_interleave(sizes).view(rows, -1) for part in (runs.numbers, valid))
    return documents, is_valid


def allowed_pairs(plan: SequencePlan, batch: int, causal: bool, window: int | None) -> Tensor:
    """Which query may see which key: bool ``[batch, length, length]`` in the order of the sequence."""
    query, key = torch.arange(plan.length)[:, None], torch.arange(plan.length)[None, :]
    allowed = (key <= query) if causal else torch.ones(plan.length, plan.length, dtype=torch.bool)
    if window is not None:
        allowed = allowed & ((key > query - window) if causal else ((query - key).abs() <= window))
    allowed = allowed.expand(batch, -1, -1)
    documents, valid = _given.get(plan, (None, None))  # as they were given, and not what the plan made of them
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    if valid is not None:
        allowed = allowed & valid[:, None, :]
    return allowed


def dense_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, differentiable by autograd. ``allowed``: ``[batch, queries, keys]``; empty rows: 0."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~allowed[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return weights @ value, lse

"""Packed rows in transformers' ``sdpa`` attention: each sample is computed alone, instead of all pairs with a mask.

Two functions replace transformers' own under the name ``sdpa``, and call these outside of packed batches. The mask is
built as before, and the mask function notes on it which mask it is. A layer that gets this very mask does not need it.
A model that changes the mask, or adds something to the scores, loses the note and gets what it would get without us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ds_trainer.data.packing.batch import POSITIONS
from ds_trainer.data.packing.token_counts import MASK
from ds_trainer.parallel.document_attention import Documents, active_documents, can_attend, document_attention
from ds_trainer.training.model.sequence_sharding.attention_modules import (
    UNSUPPORTED,
    RequestedMask,
    requested_mask,
)
from ds_trainer.utils.errors import ConfigError

_NAME = "sdpa"
_NOTE = "_ds_trainer_request"


def documents_of(batch: Any) -> Documents | None:
    """The samples of a packed batch, for :func:`~ds_trainer.parallel.document_attention.use_documents`.

    None if ``batch`` has no positions, or a mask of its own.
    """
    positions = batch.get(POSITIONS) if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.is_meta or MASK in batch:
        return None
    _register()
    return Documents(positions.cpu())


@lru_cache(maxsize=1)
def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:  # models of the user alone
        return
    AttentionInterface.register(_NAME, _attention_function(AttentionInterface()[_NAME]))
    AttentionMaskInterface.register(_NAME, _mask_function(AttentionMaskInterface()[_NAME]))


def _mask_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def packed_mask(
        *args: Any, mask_function: Callable[..., Any] | None = None, attention_mask: Any = None, **rest: Any
    ) -> Any:
        if mask_function is not None:
            rest["mask_function"] = mask_function
        mask = original(*args, attention_mask=attention_mask, **rest)
        if active_documents() is None or not isinstance(mask, torch.Tensor):
            return mask
        if mask_function is not None and attention_mask is None:
            try:
                setattr(mask, _NOTE, requested_mask(mask_function))
            except ConfigError:  # a mask that we do not know
                return mask
        return mask

    return packed_mask


def _attention_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def packed_attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> Any:
        documents, request = active_documents(), getattr(attention_mask, _NOTE, None)
        if (
            documents is None
            or not isinstance(request, RequestedMask)
            or dropout
            or any(rest.get(name) is not None for name in UNSUPPORTED)
            or not can_attend(documents, query, key, value)
        ):
            return original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **rest
            )
        out = document_attention(query, key, value, documents, request.causal, request.window, scaling)
        return out.transpose(1, 2).contiguous(), None

    return packed_attention
